"""A hand-written run: steps take 1 s, the first is committed at 101; expectations are by hand."""

from __future__ import annotations

import pytest

from elastic.protocol.causes import Cause
from elastic.protocol.events import (
    Event,
    FaultFired,
    RegroupCalled,
    RegroupDone,
    RegroupGathered,
    RegroupOutcome,
    RegroupReason,
    ReplicaHealed,
    RunEnded,
    RunStarted,
    StepRecord,
    WorkerLost,
)
from elastic.reporting.incidents import find_incidents, split_at_starts


def steps_at(*times: float, first: int = 0) -> list[StepRecord]:
    return [
        StepRecord(
            step=first + i, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=10, time=t, generation=1,
            replicas=2, sample_digests=[],
        )
        for i, t in enumerate(times)
    ]  # fmt: skip


def started(time: float = 100.0, start_step: int = 0) -> list[Event]:
    return [
        RunStarted(
            time=time, name="r", layout={"replicas": 2}, steps=9, start_step=start_step, versions={}
        ),
        RegroupCalled(time=time, generation=1, reason="fault"),
        done(time + 0.5, 1, step=start_step, replicas=2, outcome="start"),
    ]


def lost(
    time: float,
    worker: str = "w1",
    replica: int | None = 1,
    cause: str = "crash",
    node: str = "n1",
) -> WorkerLost:
    slot = None if replica is None else f"replica {replica} shard 0 tensor 0"
    return WorkerLost(
        time=time, worker=worker, node=node, pid=7, slot=slot, cause=Cause(cause), detail="gone"
    )


def called(time: float, generation: int, reason: RegroupReason = "fault") -> RegroupCalled:
    return RegroupCalled(time=time, generation=generation, reason=reason)


def gathered(time: float, generation: int) -> RegroupGathered:
    return RegroupGathered(time=time, generation=generation)


def done(
    time: float, generation: int, step: int, replicas: int, outcome: RegroupOutcome = "repeat",
    lost_steps: int = 0, repeated_steps: int = 0,
) -> RegroupDone:  # fmt: skip
    return RegroupDone(
        time=time, generation=generation, step=step, replicas=replicas, lanes={}, renumbered={},
        outcome=outcome, lost_steps=lost_steps, repeated_steps=repeated_steps,
    )  # fmt: skip


def healed(
    time: float, replica: int = 1, seconds: float = 0.5, catch_up_steps: int = 2
) -> ReplicaHealed:
    return ReplicaHealed(
        time=time,
        generation=3,
        replica=replica,
        source=0,
        bytes=1000,
        seconds=seconds,
        catch_up_steps=catch_up_steps,
    )


def test_a_crash_is_timed_from_fault_to_rejoin() -> None:
    steps = steps_at(101, 102, 103, 106.5, 107.5, 108.5)
    events = [
        *started(),
        FaultFired(time=103.5, fault="kill@3", step=3, worker="w1"),
        lost(104.0),
        called(104.25, 2),
        gathered(105.0, 2),
        done(105.25, 2, step=3, replicas=1, repeated_steps=1),
        called(107.75, 3, reason="grow"),
        gathered(107.875, 3),
        done(108.0, 3, step=5, replicas=2, outcome="boundary"),
        healed(108.25),
    ]
    (incident,) = find_incidents(events, steps)
    assert (incident.time, incident.cause, incident.step) == (104.0, "crash", 3)
    assert incident.workers == ("w1",)
    assert incident.slots == ("replica 1 shard 0 tensor 0",)
    assert (incident.outcome, incident.regrouped) == ("repeat", True)
    assert incident.detect_s == 0.5
    assert incident.decide_s == 0.25
    assert incident.abort_s == 0.75
    assert incident.roster_s == 0.25
    assert incident.first_step_s == 1.25
    assert incident.stall_s == 2.5  # a gap of 3.5 s, where the median step takes 1 s
    assert incident.rejoin_s == 4.25
    assert (incident.heal_s, incident.catch_up_steps) == (0.5, 2)
    assert (incident.lost_steps, incident.repeated_steps) == (0, 1)
    assert incident.span == (103.5, 105.25)


def test_losses_before_one_regroup_are_one_incident() -> None:
    events = [
        *started(),
        lost(103.2, "w1", cause="crash"),
        called(103.3, 2),
        lost(103.5, "w2", replica=0, cause="hang", node="n2"),
        called(103.6, 3),
        done(104.2, 3, step=3, replicas=1),
    ]
    (incident,) = find_incidents(events, steps_at(101, 102, 103, 105))
    assert incident.workers == ("w1", "w2")
    assert incident.cause == "crash, hang"
    assert incident.decide_s == pytest.approx(0.1)
    assert incident.abort_s is None and incident.roster_s == pytest.approx(0.9)


def test_stages_follow_each_other_where_survivors_notice_a_loss_before_it_is_known() -> None:
    events = [
        *started(),
        FaultFired(time=103.25, fault="freeze@3", step=3, worker="w1"),
        called(103.5, 2),
        lost(104.0, cause="hang"),
        gathered(103.75, 2),  # written down late: it was the lost one that was still waited for
        done(104.25, 2, step=3, replicas=2, repeated_steps=1),
    ]
    (incident,) = find_incidents(events, steps_at(101, 102, 103, 105))
    assert incident.detect_s == 0.75
    assert (incident.decide_s, incident.abort_s, incident.roster_s) == (0.0, 0.0, 0.25)
    assert incident.first_step_s == 0.75
    assert incident.span == (103.25, 104.25)


def test_the_last_to_come_counts_and_so_does_the_wait_for_machines_after_it() -> None:
    events = [
        *started(),
        lost(103.0, "w1"),
        called(103.25, 2),
        lost(103.5, "w2", replica=0, node="n2"),
        gathered(103.75, 2),
        done(113.75, 2, step=3, replicas=1),
    ]
    (incident,) = find_incidents(events, steps_at(101, 102, 103, 114))
    assert (incident.decide_s, incident.abort_s, incident.roster_s) == (0.25, 0.5, 10.0)


def test_records_of_versions_that_did_not_note_who_had_gathered() -> None:
    events = [
        *started(),
        lost(103.0),
        called(103.25, 2),
        done(104.25, 2, step=3, replicas=1),
    ]
    (incident,) = find_incidents(events, steps_at(101, 102, 103, 105))
    assert (incident.decide_s, incident.abort_s, incident.roster_s) == (0.25, None, 1.0)
    assert incident.span == (103.0, 104.25)
    assert (incident.heal_s, incident.catch_up_steps) == (None, None)


def test_of_several_lost_replicas_the_longest_heal_counts() -> None:
    events = [
        *started(),
        lost(103.0, "w1", replica=1),
        lost(103.0, "w2", replica=2),
        called(103.0, 2),
        gathered(103.25, 2),
        done(103.25, 2, step=3, replicas=1),
        healed(105.0, replica=1, seconds=1.5, catch_up_steps=3),
        healed(104.5, replica=2, seconds=1.0, catch_up_steps=4),
    ]
    (incident,) = find_incidents(events, steps_at(101, 102, 103, 104, 105))
    assert (incident.heal_s, incident.catch_up_steps) == (1.5, 4)
    assert incident.rejoin_s == 2.0


def test_the_end_of_an_overtaken_regroup_does_not_end_the_incident() -> None:
    events = [
        *started(),
        called(103.0, 2, reason="grow"),
        lost(103.1),
        called(103.2, 3),
        gathered(103.3, 2),
        done(103.3, 2, step=3, replicas=3),
        gathered(103.8, 3),
        done(103.9, 3, step=3, replicas=1),
    ]
    (incident,) = find_incidents(events, steps_at(101, 102, 103, 105))
    assert incident.abort_s == pytest.approx(0.6)
    assert incident.roster_s == pytest.approx(0.1)


def test_a_lost_spare_is_an_incident_without_a_regroup() -> None:
    events = [
        *started(),
        lost(102.5, "spare", replica=None),
        lost(104.5, "w1", node="n2"),
        called(104.6, 2),
        done(104.7, 2, step=4, replicas=1),
    ]
    spare, crash = find_incidents(events, steps_at(101, 102, 103, 104, 106))
    assert (spare.outcome, spare.regrouped, spare.slots) == ("no_regroup", False, ())
    assert (spare.decide_s, spare.abort_s, spare.roster_s) == (None, None, None)
    assert (spare.rejoin_s, spare.heal_s) == (None, None)
    assert spare.stall_s == 0.0
    assert spare.step == 2  # steps 0 and 1 were committed at 101 and 102
    assert (crash.workers, crash.stall_s) == (("w1",), 1.0)


def test_a_node_takes_its_spare_and_its_slot_in_one_incident() -> None:
    events = [
        *started(),
        lost(102.5, "spare", replica=None, cause="node"),
        lost(102.5, "w1", cause="node"),
        called(102.6, 2),
        done(102.7, 2, step=2, replicas=1),
    ]
    (incident,) = find_incidents(events, steps_at(101, 102, 104))
    assert incident.workers == ("spare", "w1")
    assert incident.cause == "node"


def test_a_spare_lost_long_before_on_the_same_node_is_an_incident_of_its_own() -> None:
    events = [
        *started(),
        lost(102.5, "spare", replica=None),
        lost(142.5, "w1"),
        called(142.6, 2),
        done(142.7, 2, step=2, replicas=1),
    ]
    spare, crash = find_incidents(events, steps_at(101, 102, 144))
    assert (spare.workers, crash.workers) == (("spare",), ("w1",))
    assert crash.decide_s == pytest.approx(0.1)


def test_without_a_regroup_the_incident_stays_unrecovered() -> None:
    events = [*started(), lost(102.5), called(102.75, 2), gathered(103.0, 2)]
    (incident,) = find_incidents(events, steps_at(101, 102))
    assert incident.outcome == "unrecovered"
    assert (incident.decide_s, incident.abort_s) == (0.25, 0.25)
    assert (incident.roster_s, incident.first_step_s, incident.rejoin_s) == (None, None, None)


def test_workers_that_leave_after_the_end_are_no_incident() -> None:
    ended = RunEnded(time=103.0, step=2, outcome="finished", error=None)
    assert find_incidents([*started(), ended, lost(103.5)], steps_at(101, 102)) == []


def test_a_fault_on_another_worker_explains_nothing() -> None:
    events = [
        *started(),
        FaultFired(time=101.5, fault="kill@1", step=1, worker="w9"),
        lost(102.5),
        called(102.6, 2),
        done(102.7, 2, step=2, replicas=1),
    ]
    (incident,) = find_incidents(events, steps_at(101, 102, 104))
    assert incident.detect_s is None


def test_rejoin_falls_back_to_the_number_of_replicas() -> None:
    regrouped = [*started(), lost(102.5), called(102.6, 2), done(102.7, 2, step=2, replicas=1)]
    steps = steps_at(101, 102, 104)
    assert find_incidents(regrouped, steps)[0].rejoin_s is None
    back = done(106.5, 3, step=3, replicas=2, outcome="boundary")
    assert find_incidents([*regrouped, back], steps)[0].rejoin_s == 4.0


def test_a_replica_lost_again_did_not_rejoin_by_its_later_heal() -> None:
    events = [
        *started(),
        lost(102.5, "w1"),
        called(102.6, 2),
        done(102.7, 2, step=2, replicas=1),
        lost(104.5, "w2"),
        called(104.6, 3),
        done(104.7, 3, step=3, replicas=1),
        healed(109.5),
    ]
    first, second = find_incidents(events, steps_at(101, 102, 104, 106))
    assert (first.rejoin_s, first.heal_s) == (None, None)
    assert (second.rejoin_s, second.heal_s) == (5.0, 0.5)


def test_lost_steps_are_not_part_of_the_stall() -> None:
    # Steps 2 to 4 were committed at 103, 104, 105, lost at 105.5, and done again from 108 on.
    steps = steps_at(101, 102, 108, 109, 110, 111)
    events = [*started(), lost(105.5), called(105.6, 2),
              done(107.0, 2, step=2, replicas=2, outcome="restore", lost_steps=3)]  # fmt: skip
    (incident,) = find_incidents(events, steps)
    assert incident.lost_steps == 3
    assert incident.stall_s == 2.0  # 6 s, of which 1 s for step 2 and 3 s for the lost steps


def test_no_gap_spans_a_new_start() -> None:
    events = [*started(100.0), *started(500.0, start_step=3)]
    steps = [*steps_at(101, 102, 103), *steps_at(501, 502.5, first=3)]
    starts = split_at_starts(events, steps)
    assert [(g.seconds, g.step_s) for start in starts for g in start.gaps] == [
        (1.0, 1.0),
        (1.0, 1.0),
        (1.5, 1.5),
    ]
    assert [len(start.steps) for start in starts] == [3, 2]


def test_a_step_of_the_next_start_is_not_the_first_one_after_a_loss() -> None:
    crash = [lost(103.5), called(103.75, 2), done(104.0, 2, step=3, replicas=1)]
    spare = lost(500.75, replica=None)
    events = [*started(100.0), *crash, *started(500.0, 3), spare]
    steps = [*steps_at(101, 102, 103), *steps_at(501, first=3)]
    early, late = find_incidents(events, steps)
    assert (early.step, early.first_step_s) == (3, None)
    assert late.step == 3
