"""What the soak finds wrong with losses is wrong, and what it accounts for is accounted for."""

from __future__ import annotations

import pytest

from benchmarks._chaos import Action, ActionKind, Deed, parse_layout
from benchmarks._chaos_losses import (
    find_missed_faults,
    find_unexplained_losses,
    find_unfired,
    find_wrong_causes,
)
from elastic.protocol.events import Event
from elastic.protocol.faults import parse_faults
from tests.support.chaos_events import (
    anew,
    called,
    committed,
    draining,
    ended,
    fired,
    forming,
    joined,
    lost,
    roster,
)

BEGIN = [
    forming(1, 0, "a", "b"),
    forming(2, 1, "c", "d"),
    roster(3, 1, "start", {"0": [0], "1": [1]}),
]
FROZEN = "process 1 is frozen: stopped by a signal"
LAGGED = "did not regroup in 60 s (health.regroup_timeout_s)"


def deed(kind: ActionKind, began: float, ended: float, node: str | None = None) -> Deed:
    action = Action(step=0, kind=kind, paused=False)
    return Deed(action=action, began=began, ended=ended, nodes=() if node is None else (node,))


def test_wrong_causes() -> None:
    happened: list[Event] = [
        fired(1, "kill@1:0", "a"),
        fired(2, "freeze@2:0", "b"),
        fired(3, "raise@3:0", "c"),
        fired(4, "kill@9.shutdown:0", "d"),
        lost(4, "a", "crash"),
        lost(5, "b", "crash"),
    ]
    faults = parse_faults("kill@1:0,freeze@2:0,raise@3:0,kill@9.shutdown:0")
    assert find_wrong_causes(happened, faults) == [
        "freeze@2:0 on b: crash",
        "raise@3:0 on c: not lost",
    ]


@pytest.mark.parametrize(
    ("fault", "happened", "deeds", "good"),
    [
        # It went with its machine, before anybody could find it frozen; or the other one did.
        ("freeze@2:0", [lost(6, "a", "node", node="m")], [deed("remove", 5, 7, "m")], True),
        ("freeze@2:0", [lost(6, "a", "node", node="m")], [deed("remove", 5, 7, "n")], False),
        # It was on a machine that will go.
        ("kill@2:0", [draining(4, "a"), lost(6, "a", "preemption")], [], True),
        ("kill@2:0", [draining(4, "c"), lost(6, "a", "preemption")], [], False),
        ("freeze@2:0", [draining(4, "a"), lost(6, "a", "preemption")], [], False),
        # The coordinator wrote the fault down, and was killed before it said so; or long after.
        ("kill@2:0", [anew(7)], [deed("coordinator", 6, 7)], True),
        ("kill@2:0", [anew(60)], [deed("coordinator", 50, 60)], False),
        # The peer of a worker that raised was lost at that time; or later, or it was the cause.
        ("raise@2:0", [lost(5.5, "b", "crash")], [], True),
        ("raise@2:0", [lost(9, "b", "crash")], [], False),
        ("raise@2:0", [lost(5.5, "b", "user_error")], [], False),
        ("raise@2:0", [lost(5.5, "c", "crash")], [], False),
        ("kill@2:0", [lost(5.5, "b", "crash")], [], False),
        # The replica was given up, as the machine of one of its workers was to go.
        ("raise@2:0", [draining(4, "b")], [], True),
        ("raise@2:0", [draining(4, "c")], [], False),
        # The run ended without a worker that it did not need; or one that it needed.
        ("freeze@2:spare", [ended(6)], [], True),
        ("freeze@2:spare", [ended(60)], [], False),
        ("kill@2.build:0", [ended(6)], [], True),
        ("kill@2:0", [ended(6)], [], False),
    ],
)
def test_a_worker_that_was_hit_is_lost_for_its_fault(
    fault: str, happened: list[Event], deeds: list[Deed], good: bool
) -> None:
    found = find_wrong_causes([*BEGIN, fired(5, fault, "a"), *happened], parse_faults(fault), deeds)
    assert (found == []) == good


def test_losses_with_a_reason() -> None:
    happened = [
        *BEGIN,
        fired(5, "freeze@2:0+1", "a"),
        fired(5, "freeze@2:0+1", "b"),
        lost(6, "a", "hang", detail=FROZEN),
        lost(6, "b", "hang", detail=FROZEN),
        lost(8, "c", "node", node="m"),
        lost(9, "d", "preemption", node="m"),
    ]
    assert find_unexplained_losses(happened, [deed("remove", 7, 8, "m")]) == []


@pytest.mark.parametrize(
    ("cause", "node", "at", "explained"),
    [
        ("collective", "m", 9, True),
        ("collective", "n", 9, True),  # where the lost one itself is
        ("hang", "m", 9, True),
        ("hang", "o", 9, False),
        ("collective", "o", 9, False),  # no machine of its replica
        ("collective", "m", 30, False),  # long after
        ("crash", "m", 9, False),
    ],
)
def test_a_replica_over_a_bad_link_may_lose_either_end(
    cause: str, node: str, at: float, explained: bool
) -> None:
    happened = [joined(1, "a", "n"), joined(1, "b", "m"), *BEGIN, lost(at, "a", cause, node="n")]
    found = find_unexplained_losses(happened, [deed("mtu", 4, 8, node)])
    assert (found == []) == explained


@pytest.mark.parametrize(
    ("happened", "deeds"),
    [
        # Nothing had happened to it.
        ([lost(6, "a", "crash", detail="process 1 ended")], []),
        ([lost(6, "a", "node", node="m")], [deed("remove", 5, 6, "n")]),
        # That came later.
        ([lost(6, "a", "node", node="m")], [deed("remove", 7, 8, "m")]),
        ([lost(6, "a"), fired(7, "kill@2:0", "a")], []),
        # Another one was hit, and this one waited for it in vain.
        ([fired(5, "kill@2:1", "b"), lost(5.1, "b"), lost(65, "a", "hang", detail=LAGGED)], []),
        # It was hit by a fault that did not do what it should.
        ([fired(5, "freeze@2:0", "a"), lost(65, "a", "hang", detail=LAGGED)], []),
        # Its machine was to go.
        ([draining(5, "a"), lost(6, "a", "preemption")], []),
    ],
)
def test_losses_without_a_reason(happened: list[Event], deeds: list[Deed]) -> None:
    found = find_unexplained_losses([*BEGIN, *happened], deeds)
    assert len(found) == 1 and found[0].startswith("a: ")


def test_unfired() -> None:
    faults = parse_faults("kill@2:0+3,raise@4.build:1,freeze@4:spare,raise@5:1,kill@6:spare")
    happened = [
        *BEGIN,
        fired(5, "kill@2:0+3", "d"),
        fired(5.5, "raise@4.build:1", "b"),
        forming(6, 1, "b", "e"),
        fired(7, "raise@5:1", "b"),  # it is in slot 2 by now
        fired(8, "freeze@4:spare", "f"),
    ]
    assert [
        (str(f), slot) for f, slot in find_unfired(happened, faults, parse_layout("2x2x1"))
    ] == [
        ("kill@2:0+3", 0),
        ("raise@5:1", 1),
        ("kill@6:spare", None),
    ]


STEPS = [committed(4 + i, 1, step=i) for i in range(5)]
"""The first roster commits steps 0 to 4 at 4 to 8."""
LONE = {"0": [0, 1], "1": []}


@pytest.mark.parametrize(
    ("faults", "happened", "missed"),
    [
        ("kill@3:0", [], ["kill@3:0 did not hit slot 0"]),
        ("kill@3.reduce:1+2", [fired(7.5, "kill@3.reduce:1+2", "b")], 1),
        # It went off, or there was no such step any more.
        ("kill@3:0", [fired(6.5, "kill@3:0", "a")], []),
        ("kill@5:0", [], []),
        # From step 3 on the workers were called, another fault had hit the roster, or it was gone.
        ("kill@3:0", [called(6.5, 2)], []),
        ("kill@3:0", [called(7.5, 2)], ["kill@3:0 did not hit slot 0"]),
        ("raise@2:3,kill@3:0", [fired(6.5, "raise@2:3", "d")], []),
        # The first did not come, and the second waits for it; or the first came at last.
        ("kill@3.heal_source:3,kill@3:0", [], []),
        ("kill@3:spare,kill@3:0", [fired(7.5, "kill@3:spare", "s")], []),
        ("kill@2:spare,kill@3:0", [], ["kill@3:0 did not hit slot 0"]),
        # To a coordinator started anew, what has hit one has hit all.
        ("kill@3.reduce:1+2", [fired(7.5, "kill@3.reduce:1+2", "b"), anew(9)], []),
        # At the end everybody comes by, if it is there, with lanes.
        ("kill@3.checkpoint:0", [], ["kill@3.checkpoint:0 did not hit slot 0"]),
        ("freeze@5.shutdown:3", [], ["freeze@5.shutdown:3 did not hit slot 3"]),
        ("freeze@5.shutdown:3", [lost(8.5, "d")], []),
        ("kill@3:spare,kill@3.checkpoint:0", [fired(8.5, "kill@3:spare", "s")], []),
        ("kill@3.evaluation:3", [roster(8.5, 2, "boundary", LONE)], []),
        ("kill@3.evaluation:0", [roster(8.5, 2, "boundary", LONE)], 1),
        # Whether there was a recovery to hit does not show.
        ("kill@3.build:0", [], []),
        ("kill@3.heal_target:0", [], []),
        ("kill@3:spare", [], []),
    ],
)
def test_missed_faults(faults: str, happened: list[Event], missed: list[str] | int) -> None:
    found = find_missed_faults(
        [*BEGIN, *happened], STEPS, parse_faults(faults), parse_layout("2x2x1")
    )
    assert (len(found) if isinstance(missed, int) else found) == missed


@pytest.mark.parametrize(
    ("lanes", "missed"),
    [
        ({"0": [0], "1": [1]}, ["kill@3:1 did not hit slot 1"]),
        ({"0": [0, 1]}, []),  # there is no such replica
        ({"0": [0], "1": [1], "2": []}, []),  # while a replica heals nobody is hit
    ],
)
def test_who_can_be_hit(lanes: dict[str, list[int]], missed: list[str]) -> None:
    formed = [forming(1, i, worker) for i, worker in enumerate("abc")]
    happened = [*formed, roster(3, 1, "start", lanes)]
    faults, layout = parse_faults("kill@3:1"), parse_layout("3x1x1")
    assert find_missed_faults(happened, STEPS, faults, layout) == missed


def test_a_successor_is_hit_under_its_new_number() -> None:
    """It forms beside the replica that will leave, and has its number from the next roster on."""
    happened = [
        *[forming(1, i, worker) for i, worker in enumerate("ab")],
        roster(3, 1, "start", {"0": [0], "1": [1]}),
        forming(3.1, 2, "c"),
        roster(3.2, 2, "boundary", {"0": [0], "1": [1]}, renumbered={"2": 1}),
        fired(7.5, "kill@3:1", "c"),
    ]
    faults, layout = parse_faults("kill@3:1"), parse_layout("2x1x1")
    assert find_unfired(happened, faults, layout) == []
    steps = [committed(4 + i, 2, step=i) for i in range(5)]
    assert find_missed_faults(happened, steps, faults, layout) == []
    assert find_unfired(happened[:-1], faults, layout) == [(faults[0], 1)]
    assert find_missed_faults(happened[:-1], steps, faults, layout) != []
