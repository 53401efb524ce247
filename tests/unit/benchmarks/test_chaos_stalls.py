"""What the soak calls a stall is one, and what the schedule explains is not."""

from __future__ import annotations

import pytest

from benchmarks._chaos import HEALTH, Action, ActionKind, Deed
from benchmarks._chaos_stalls import (
    IMPORT_S,
    PROFILE_S,
    START_S,
    find_long_stalls,
    longest_stall_s,
)
from elastic.protocol.events import Event
from tests.support.chaos_events import (
    anew,
    committed,
    draining,
    ended,
    fired,
    forming,
    joined,
    lost,
    profiled,
    roster,
    started,
)

BOUND_S = 15.0
"""`freeze_timeout_s` + `node_timeout_s`: 10 + 5 s."""
STEP_S = 1.0
"""What a step takes below."""


def deed(kind: ActionKind, began: float, ended: float, *, paused: bool) -> Deed:
    action = Action(step=0, kind=kind, paused=paused)
    return Deed(action=action, began=began, ended=ended, nodes=("m",))


def stalls(
    happened: list[Event], *, gap_s: float, deeds: tuple[Deed, ...] = (), least: int = 2
) -> list[str]:
    """Of a run of workers a, b and c with a commit at 101, and the next one after `gap_s` and the
    time that a step takes."""
    begin = [joined(70, "a"), joined(71, "b"), joined(72, "c"), roster(100, 1, "start", {"0": [0]})]
    gap_s += STEP_S
    steps = [committed(101, 1), committed(101 + gap_s, 2), committed(101 + gap_s + STEP_S, 2)]
    return find_long_stalls(
        [*begin, *happened, ended(103 + gap_s)], steps, HEALTH, least_workers=least, deeds=deeds
    )


def test_the_bound_lies_below_timeouts_that_are_meant_for_something_else() -> None:
    assert longest_stall_s(HEALTH) == BOUND_S
    assert min(HEALTH.regroup_timeout_s, HEALTH.collective_timeout_s) > 2 * BOUND_S
    assert BOUND_S < 25


def test_a_gap_has_a_bound() -> None:
    assert stalls([], gap_s=BOUND_S - 0.1) == []
    assert stalls([], gap_s=BOUND_S + 0.1) == [
        "stood still for 15.1 s without a reason, between 31.0 and 47.1 s"
    ]


def test_a_step_may_take_as_long_as_one_replica_needs_for_all_lanes() -> None:
    """A replica has one lane at first and three later: three times what a step takes."""
    alone: list[Event] = [roster(102, 2, "boundary", {"0": [0, 1, 2], "1": []})]
    more_s = 2 * STEP_S
    assert stalls(alone, gap_s=BOUND_S + more_s - 0.1) == []
    assert len(stalls(alone, gap_s=BOUND_S + more_s + 0.1)) == 1


def test_the_way_to_the_first_commit_and_to_the_end_has_one() -> None:
    happened = [roster(100, 1, "start", {"0": [0]}), ended(140)]
    found = find_long_stalls(happened, [committed(120, 1)], HEALTH, least_workers=1)
    assert [line.split(" s ")[0] for line in found] == [
        "stood still for 20.0",
        "stood still for 20.0",
    ]


@pytest.mark.parametrize("timeout_s", [25, 60, 300])
def test_a_timeout_is_caught_in_spite_of_a_fault(timeout_s: float) -> None:
    """A worker is lost, and a spare is there."""
    happened: list[Event] = [fired(102, "freeze@1:0", "a"), lost(102.5, "a", "hang")]
    assert stalls(happened, gap_s=0.5 + timeout_s)
    assert not stalls(happened, gap_s=3.0)


@pytest.mark.parametrize("timeout_s", [25, 60, 300])
def test_a_timeout_is_caught_in_spite_of_a_start(timeout_s: float) -> None:
    """Both are lost, and workers start at once: the rest of the time is not theirs."""
    happened = [lost(102, "a"), lost(102, "b"), joined(108, "d"), forming(109, 0, "c", "d")]
    assert stalls(happened, gap_s=8 + timeout_s)
    assert not stalls(happened, gap_s=8 + 2)


@pytest.mark.parametrize(
    ("happened", "deeds", "explained_s"),
    [
        # Too few workers are there, until the new one has joined, which may take START_S at most.
        ([lost(102, "a"), lost(102, "b"), joined(127, "d"), forming(129, 0, "c", "d")], [], 27),
        ([lost(102, "a"), lost(102, "b"), joined(127, "d")], [], 25 + IMPORT_S),
        ([lost(102, "a"), draining(102, "b"), joined(127, "d")], [], 25 + IMPORT_S),
        ([lost(102, "a"), lost(102, "b"), joined(402, "d")], [], START_S),
        ([lost(102, "a"), lost(102, "b")], [], START_S),
        ([lost(102, "a"), joined(127, "d")], [], 0),
        # A fault for two workers hits one, and waits for the other; or has them both.
        ([fired(102, "kill@1:0+1", "a")], [], 5),
        ([fired(102, "kill@1:0+1", "a"), fired(104, "kill@1:0+1", "b")], [], 2),
        ([fired(102, "kill@1:0", "a")], [], 0),
        # The run was paused, a machine was silent, nobody coordinated.
        ([], [deed("add", 102, 122, paused=True)], 20),
        ([], [deed("add", 102, 122, paused=False)], 0),
        ([], [deed("remove", 102, 103, paused=False)], 6),
        ([], [deed("drain", 102, 103, paused=False)], 0),
        ([anew(109)], [deed("coordinator", 102, 102, paused=False)], 7),
        # A profile was written.
        ([profiled(121)], [], 20),
        ([profiled(171)], [], PROFILE_S),
        # What explains the same time twice explains it once.
        ([anew(109)], [deed("coordinator", 102, 112, paused=True)], 10),
        (
            [lost(110, "a"), lost(110, "b"), joined(120, "d")],
            [deed("add", 102, 122, paused=True)],
            28,
        ),
    ],
)
def test_what_the_schedule_explains(
    happened: list[Event], deeds: list[Deed], explained_s: float
) -> None:
    gap_s = explained_s + BOUND_S
    assert stalls(happened, gap_s=gap_s - 0.1, deeds=tuple(deeds)) == []
    assert len(stalls(happened, gap_s=gap_s + 0.1, deeds=tuple(deeds))) == 1


@pytest.mark.parametrize(("roster_s", "good"), [(18, True), (START_S + BOUND_S + 1, False)])
def test_a_driver_that_comes_too_late_starts_the_run_once_more(roster_s: float, good: bool) -> None:
    first = [joined(70, "a"), roster(100, 1, "start", {"0": [0]}), ended(102)]
    second = [started(103), roster(102 + roster_s, 2, "start", {"0": [0]}), ended(104 + roster_s)]
    found = find_long_stalls([*first, *second], [committed(101, 1)], HEALTH, least_workers=1)
    assert (found == []) == good


def test_what_was_over_explains_nothing() -> None:
    begin = [joined(70, "a"), lost(95, "a"), joined(96, "b"), forming(99, 0, "b")]
    late = [roster(100, 1, "start", {"0": [0]}), ended(121)]
    found = find_long_stalls([*begin, *late], [committed(101, 1)], HEALTH, least_workers=1)
    assert len(found) == 1
