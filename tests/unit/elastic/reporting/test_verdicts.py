"""From events to verdicts. What each sign means is tested in `tests/unit/health`."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from elastic.protocol.causes import COLLECTIVE, CRASH, NODE, USER_ERROR, Cause
from elastic.protocol.events import (
    CrossGroupLost,
    Event,
    RegroupCalled,
    RegroupDone,
    ReplicaForming,
    RunEnded,
    SignsChanged,
    StepRecord,
    StragglersFound,
    WorkerJoined,
    WorkerLost,
)
from elastic.reporting import verdicts
from elastic.reporting.incidents import find_incidents
from elastic.reporting.verdicts import AFTER_S, BEFORE_S, Advice, EventFacts, find_verdicts
from health.verdict import Sign, sign_from_json

XID = Sign(
    name="xid_79",
    source="log",
    role="root",
    cause="gpu_error",
    subject="gpu",
    detail="GPU has fallen off the bus",
    node="n1",
    remedy="reboot",
)
GPU_LOST = replace(
    XID, name="gpu_lost", source="reading", detail="cannot be reached", decisive=True
)


def lost(worker: str, time: float, cause: Cause = CRASH, detail: str = "gone") -> WorkerLost:
    return WorkerLost(
        time=time,
        worker=worker,
        node=f"n{worker[1:]}",
        pid=1,
        slot=f"replica {worker[1:]} shard 0 tensor 0",
        cause=cause,
        detail=detail,
    )


def shows(node: str, time: float, *signs: Sign, names: tuple[str, ...] = ()) -> SignsChanged:
    return SignsChanged(
        time=time, node=node, names=list(names), signs=[sign.to_json() for sign in signs]
    )


def found(*events: Event, steps: tuple[StepRecord, ...] = ()) -> list[Advice]:
    return find_verdicts(events, steps, find_incidents(events, steps))


def of(one: Advice) -> tuple[str, tuple[str, ...], tuple[str, ...], str | None]:
    return (
        one.verdict.cause,
        one.verdict.workers,
        one.verdict.nodes,
        one.remedy,
    )


@pytest.mark.parametrize(
    ("shown", "cause"),
    [
        ((shows("n1", 100.0 - BEFORE_S, XID),), "gpu_error"),
        ((shows("n1", 100.0 + AFTER_S, XID),), "gpu_error"),
        ((shows("n1", 101.0 + AFTER_S, XID),), "crash"),
        ((shows("n1", 20.0, XID),), "gpu_error"),  # it stood when the time began
        ((shows("n1", 20.0, XID), shows("n1", 30.0)), "crash"),  # and here not any more
        ((shows("n1", 20.0, XID), shows("n1", 90.0)), "gpu_error"),
        ((shows("n0", 90.0, replace(XID, node="n0")),), "crash"),
    ],
)
def test_signs_round_an_incident_explain_it(shown: tuple[Event, ...], cause: str) -> None:
    events = sorted([*shown, lost("w1", 100.0)], key=lambda event: event.time)
    assert found(*events)[0].verdict.cause == cause


def test_a_verdict_has_what_is_due_and_where_training_went_on() -> None:
    (one,) = found(shows("n1", 99.0, XID), lost("w1", 100.0))
    assert of(one) == ("gpu_error", ("w1",), ("n1",), "reboot")
    assert (one.time, one.step) == (100.0, 0)


def test_the_same_fault_again_asks_for_more_until_a_step_is_committed() -> None:
    crashes = [lost(f"w{i}", 100.0 + 1000 * i) for i in range(3)]
    starts = [CrossGroupLost(time=1.0, generation=1, slot=None, reason="")]
    separate = [replace(crash, slot=None) for crash in crashes]  # spares: an incident each
    assert [of(f)[3] for f in found(*starts, *separate)] == [
        "new_process",
        "other_seat",
        "stop",  # on the third machine it is none's fault
    ]
    step = StepRecord(
        step=0,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens=1,
        time=1500.0,
        generation=1,
        replicas=1,
        sample_digests=[],
    )
    assert [of(f)[3] for f in found(*separate, steps=(step,))] == [
        "new_process",
        "other_seat",
        "new_process",
    ]


def test_the_same_fault_of_two_at_once_is_one_try() -> None:
    called = RegroupCalled(time=100.0, generation=2, reason="fault")
    together = [lost("w1", 100.1), lost("w2", 100.5)]
    done = RegroupDone(
        time=101.0, generation=2, step=0, replicas=1, lanes={}, renumbered={}, outcome="repeat",
        lost_steps=0, repeated_steps=1,
    )  # fmt: skip
    later = replace(lost("w3", 1100.0), slot=None)
    steps = [of(one)[3] for one in found(called, *together, done, later)]
    assert steps == ["new_process", "new_process", "other_seat"]


def test_a_peer_that_exceptions_name_by_its_instance_id_is_blamed() -> None:
    line = "NET/OFI completed with error (Unresponsive remote (was) Peer host id: i-0123456789)"
    (one,) = found(
        shows("n3", 1.0, names=("i-0123456789",)),
        lost("w0", 100.0, COLLECTIVE, f"DistBackendError\n{line}"),
        lost("w1", 100.1, COLLECTIVE, line),
    )
    assert of(one) == ("link", (), ("n3",), "other_seat")


def test_a_group_that_failed_names_a_peer_too() -> None:
    line = "Unresponsive remote (was previously responsive) Peer host id: i-0123456789"
    advice = found(
        shows("n3", 1.0, names=("i-0123456789",)),
        CrossGroupLost(time=99.0, generation=2, slot="replica 0 shard 0 tensor 0", reason=line),
        lost("w1", 100.0, COLLECTIVE, line),
    )
    assert ("link", (), ("n3",), "other_seat") in map(of, advice)


@pytest.mark.parametrize(
    ("told", "confidence"),
    [
        ([("w0", "n0")], "weak"),  # it may be at fault itself
        ([("w0", "n0"), ("w1", "n0")], "weak"),
        ([("w0", "n0"), ("w2", "n2")], "likely"),
    ],
)
def test_the_peer_that_two_machines_name_as_their_group_fails_is_blamed(
    told: list[tuple[str, str]], confidence: str
) -> None:
    line = "Unresponsive remote (was previously responsive) Peer host id: i-0123456789"
    failed = [
        CrossGroupLost(time=99.0, generation=2, slot=None, reason=line, worker=worker, node=node)
        for worker, node in told
    ]
    advice = found(shows("n3", 1.0, names=("i-0123456789",)), *failed, lost("w9", 100.0))
    (link,) = [one for one in advice if one.verdict.cause == "link"]
    assert (link.verdict.nodes, link.verdict.confidence) == (("n3",), confidence)


def test_what_an_error_says_does_not_change_what_it_was() -> None:
    text = "ValueError: CUDA error: uncorrectable ECC error encountered"
    (one,) = found(lost("w1", 100.0, USER_ERROR, text))
    assert of(one) == ("user_error", ("w1",), (), "new_process")


def test_where_the_run_stopped_for_what_came_back_that_is_what_was_done() -> None:
    """Two workers in one incident: each is met for the first time."""
    both = [lost("w1", 100.0, USER_ERROR, "raised"), lost("w2", 100.1, USER_ERROR, "raised")]
    end = RunEnded(time=101.0, step=0, outcome="failed", error="raised", cause=USER_ERROR)
    assert {one.remedy for one in found(*both, end)} == {"stop"}
    for other in (
        replace(end, cause=None),
        replace(end, cause=CRASH),
        replace(end, step=7),
        replace(end, time=99.0),  # of the start before
    ):
        assert {one.remedy for one in found(*both, other)} == {"new_process"}


def test_what_a_machine_shows_at_the_end_is_judged_too_unless_all_its_workers_are_gone() -> None:
    joined = WorkerJoined(time=0.0, worker="w1", node="n1", pid=1, born_ticks=None)
    (one,) = found(joined, shows("n1", 50.0, GPU_LOST))
    assert of(one) == ("gpu_error", (), ("n1",), "reboot")
    assert found(joined, shows("n1", 50.0, GPU_LOST), shows("n1", 60.0)) == []
    once = found(joined, shows("n1", 50.0, GPU_LOST), lost("w1", 100.0))
    assert [of(one) for one in once] == [("gpu_error", ("w1",), ("n1",), "reboot")]


def test_a_machine_whose_workers_were_lost_before_has_no_part_in_an_incident() -> None:
    """It may be gone: nobody says any more what it shows."""
    joined = [
        WorkerJoined(time=0.0, worker=f"w{i}", node=f"n{i}", pid=i, born_ticks=None) for i in (1, 2)
    ]
    facts = EventFacts([*joined, shows("n1", 99.0, GPU_LOST), lost("w1", 100.0)])
    facts.take(lost("w2", 130.0))
    first, second = (
        {sign.node for sign in facts.between(at - BEFORE_S, at + AFTER_S, [worker]).signs}
        for at, worker in ((100.0, "w1"), (130.0, "w2"))
    )
    assert (first, second) == ({"n1"}, {"n2"})


def test_a_machine_that_was_taken_back_counts_as_one_that_lives() -> None:
    """A coordinator that was cut off had written it off; the one started anew heard of it."""
    joined = [
        WorkerJoined(time=0.0, worker=f"w{i}", node=f"n{i}", pid=i, born_ticks=None) for i in (1, 2)
    ]
    taken_back = replace(joined[0], time=110.0)
    facts = EventFacts([*joined, lost("w1", 100.0, NODE), taken_back])
    facts.take(shows("n1", 150.0, GPU_LOST))

    def shown() -> set[str]:
        return {sign.name for sign in facts.standing().signs}

    for forgotten in (90.0, 140.0):  # of the incident nothing is left by then
        facts.forget_before(forgotten)
        assert (shown(), facts.standing().nodes["w1"]) == ({"gpu_lost"}, "n1")
    facts.take(lost("w2", 160.0))
    around = facts.between(160.0 - BEFORE_S, 160.0 + AFTER_S, ["w2"])
    assert {sign.name for sign in around.signs} == {"gpu_lost", "crash"}
    facts.take(lost("w1", 170.0))
    assert shown() == set()
    facts.forget_before(180.0)
    assert facts.standing().nodes == {}


def test_a_loss_that_was_wrong_is_still_one_of_its_incident() -> None:
    joined = [
        WorkerJoined(time=at, worker="w1", node="n1", pid=1, born_ticks=None) for at in (0.0, 110.0)
    ]
    advice = found(joined[0], lost("w1", 100.0, NODE), joined[1], shows("n1", 200.0, GPU_LOST))
    assert [one.verdict.cause for one in advice] == ["node", "gpu_error"]


def test_a_slow_replica_is_named_at_the_end() -> None:
    def paces(number: int, how: str) -> list[Event]:
        worker = f"w{number}"
        sign = Sign(
            name=how,
            source="reading",
            role="confirmation",
            cause="slow",
            subject="worker",
            detail=how,
            worker=worker,
            node=f"n{number}",
        )
        return [
            WorkerJoined(time=0.0, worker=worker, node=f"n{number}", pid=1, born_ticks=None),
            ReplicaForming(time=1.0, formed=number + 1, replica=number, workers=[worker]),
            shows(f"n{number}", 50.0, sign),
        ]

    events = [e for i in range(3) for e in paces(i, "waits_little" if i == 1 else "waits_much")]
    (one,) = found(*events)
    assert of(one) == ("slow", ("w1",), (), "other_seat")


def test_signs_of_another_version_are_passed_by() -> None:
    event = SignsChanged(time=99.0, node="n1", names=[], signs=[{"later": 1}, XID.to_json()])
    assert found(event, lost("w1", 100.0))[0].verdict.cause == "gpu_error"


def test_facts_of_a_run_that_goes_on_are_those_of_its_whole_record() -> None:
    """Taken one by one, and forgotten where nothing needs them any more."""
    told = [
        shows("n1", 10.0, XID),
        shows("n2", 20.0, replace(GPU_LOST, node="n2")),
        shows("n1", 300.0),
        shows("n3", 395.0, replace(XID, node="n3")),
    ]
    loss = lost("w3", 400.0)
    whole = EventFacts([*told, loss])
    grown = EventFacts()
    for event in told:
        grown.take(event)
        grown.forget_before(event.time - BEFORE_S)
    grown.take(loss)
    expected = {("gpu_lost", "n2"), ("xid_79", "n3"), ("crash", "n3")}
    for facts in (whole, grown, grown):
        signs = facts.between(400.0 - BEFORE_S, 430.0, ["w3"]).signs
        assert {(sign.name, sign.node) for sign in signs} == expected
    earlier = whole.between(15.0, 25.0, []).signs  # back in time
    assert {(sign.name, sign.node) for sign in earlier} == {("xid_79", "n1"), ("gpu_lost", "n2")}
    grown.forget_before(500.0)
    for one in (whole, grown):
        one.take(shows("n4", 580.0, replace(XID, node="n4")))
    for begin in (600.0, 550.0):  # and back
        later = grown.between(begin, 700.0, []).signs
        assert later == whole.between(begin, 700.0, []).signs
        assert {(sign.name, sign.node) for sign in later} == {
            ("gpu_lost", "n2"),
            ("xid_79", "n4"),
        }


def test_what_machines_show_goes_by_the_order_in_which_they_told() -> None:
    """The coordinator's clock may be set back."""
    joined = [
        WorkerJoined(time=0.0, worker=f"w{i}", node=f"n{i}", pid=i, born_ticks=None) for i in (1, 2)
    ]
    facts = EventFacts([*joined, shows("n1", 500.0, GPU_LOST), shows("n1", 1000.0, XID)])

    def shown() -> set[str]:
        names = {sign.name for sign in facts.standing().signs}
        assert names == {name for name, _ in facts.told()}
        return names

    assert shown() == {"xid_79"}
    facts.between(1000.0 + 2 * BEFORE_S, 2000.0, [])
    other = replace(XID, name="xid_48", node="n2")
    facts.take(shows("n2", 700.0, other))
    assert shown() == {"xid_79", "xid_48"}
    assert {s.name for s in facts.between(1100.0, inf, []).signs} == {"xid_79", "xid_48"}
    facts.take(shows("n1", 701.0))
    assert shown() == {"xid_48"}
    facts.forget_before(2000.0)
    assert shown() == {"xid_48"}


@pytest.mark.parametrize("cleared", [True, False])
def test_signs_cleared_before_the_clock_was_set_back_explain_no_loss(cleared: bool) -> None:
    """What stands still does, however late it seems to have been told."""
    joined = WorkerJoined(time=0.0, worker="w1", node="n1", pid=1, born_ticks=None)
    facts = EventFacts([joined, shows("n1", 1000.0, XID)])
    if cleared:
        facts.take(shows("n1", 1100.0))
    facts.take(lost("w1", 510.0))
    signs = facts.between(510.0 - BEFORE_S, inf, ["w1"]).signs
    assert {sign.name for sign in signs} == ({"crash"} if cleared else {"crash", "xid_79"})


def test_facts_of_many_incidents_look_at_no_machine_that_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 machines that have each shown something once, and 1,000 incidents: signs are read as
    often as there is something to read."""
    read: list[None] = []

    def counted(data: dict[str, Any]) -> Sign | None:
        read.append(None)
        return sign_from_json(data)

    monkeypatch.setattr(verdicts, "sign_from_json", counted)
    events: list[Event] = []
    for i in range(1000):
        sign = replace(XID, node=f"m{i}")
        events += [shows(f"m{i}", 1000.0 * i + 1, sign), shows(f"m{i}", 1000.0 * i + 2)]
    facts = EventFacts(events)
    for i in range(1000):
        facts.between(1000.0 * i, 1000.0 * i + 10, [])
    assert len(read) == 1000


THROTTLED = Sign(
    name="throttled",
    source="reading",
    role="confirmation",
    cause="slow",
    subject="gpu",
    detail="the hardware slows its clocks 90% of the time",
    node="n1",
)
HUNG = replace(THROTTLED, name="storage_hung", cause="hang", subject="storage", detail="hung")


def slow(time: float, *workers: str, nodes: tuple[str, ...] = ()) -> StragglersFound:
    return StragglersFound(
        time=time,
        step=7,
        workers=list(workers),
        nodes=list(nodes),
        score=0.3,
        part="compute",
        detail="slow in 5 rounds running",
    )


JOINED = tuple(
    WorkerJoined(time=0.0, worker=f"w{i}", node=f"n{i}", pid=i, born_ticks=None) for i in range(4)
)


def test_stragglers_have_a_verdict_with_what_their_machine_shows() -> None:
    other = shows("n2", 100.0, replace(THROTTLED, node="n2", detail="another one"))
    shown = shows("n1", 100.0, THROTTLED, HUNG)
    one, *_ = found(*JOINED, shown, other, slow(110.0, "w1", nodes=("n1",)))
    assert of(one) == ("slow", ("w1",), ("n1",), "other_seat")
    assert (one.step, one.verdict.confidence) == (7, "likely")
    assert one.verdict.evidence == ("slow in 5 rounds running", THROTTLED.detail, "hung")


def test_of_stragglers_that_cannot_be_told_apart_no_machine_is_blamed() -> None:
    (one,) = found(*JOINED, slow(110.0, "w1", "w2"))
    assert of(one) == ("slow", ("w1", "w2"), (), "other_seat")


def spare_lost(worker: str, time: float) -> WorkerLost:
    """An incident of its own."""
    return replace(lost(worker, time), slot=None)


def test_stragglers_and_incidents_come_in_the_order_of_time() -> None:
    advice = found(
        *JOINED, spare_lost("w0", 50.0), slow(110.0, "w1", nodes=("n1",)), spare_lost("w2", 1000.0)
    )
    assert [one.verdict.cause for one in advice] == ["crash", "slow", "crash"]
