from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from elastic.coordinator.replay import Replay, replacements_begun, replay
from elastic.protocol import events
from elastic.protocol.causes import CRASH, HANG, LINK, NODE, PATH, PREEMPTION, Cause
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import EventLog, present_start, read_events
from health.verdict import Step
from trainer.loop.samples import Skip


def step(number: int, generation: int, time: float) -> events.StepRecord:
    return events.StepRecord(
        step=number, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, time=time, generation=generation,
        replicas=2, sample_digests=[1],
    )  # fmt: skip


def started(time: float, start_step: int = 0) -> events.RunStarted:
    return events.RunStarted(
        time=time, name="r", layout={}, steps=9, start_step=start_step, versions={}
    )


def joined(worker: str) -> events.WorkerJoined:
    return events.WorkerJoined(time=1.0, worker=worker, node=f"n-{worker}", pid=1, born_ticks=1)


def lost(worker: str, cause: Cause = CRASH, slot: str | None = None) -> events.WorkerLost:
    return events.WorkerLost(
        time=2.0, worker=worker, node=f"n-{worker}", pid=1, slot=slot, cause=cause, detail=""
    )


def regrouped(time: float, generation: int, at: int, outcome: Any) -> events.RegroupDone:
    return events.RegroupDone(
        time=time, generation=generation, step=at, replicas=2, lanes={}, outcome=outcome,
        renumbered={}, lost_steps=0, repeated_steps=0,
    )  # fmt: skip


def met(step: Step, outcome: events.RemedyOutcome) -> events.VerdictReached:
    """A verdict about a worker, and a machine that is named after what was done."""
    return events.VerdictReached(
        time=3.0, cause="crash", workers=["b"], nodes=[f"{step} {outcome}"], evidence=[],
        confidence="certain", fingerprint="", committed=2, step=step, outcome=outcome, detail="",
    )  # fmt: skip


def write(root: Path, happened: list[events.Event], steps: list[events.StepRecord]) -> RunPaths:
    paths = RunPaths(root=root)
    with EventLog(paths.events) as log:
        for event in happened:
            log.append(event)
    with EventLog(paths.steps) as log:
        for record in steps:
            log.append(record)
    return paths


def replay_of(paths: RunPaths, start_step: int) -> Replay:
    """Of the last start in the records."""
    happened = read_events(paths.events)
    begun = [e.time for e in happened if isinstance(e, events.RunStarted)]
    return replay(paths, present_start(happened, begun[-1]), start_step)


def test_the_present_start_counts(tmp_path: Path) -> None:
    before = [started(0.0), joined("old"), regrouped(1.0, 1, 0, "start")]
    drain = events.Draining(time=3.0, workers=["b", "c"], node="n-b", reason="", deadline_s=None)
    leave = events.Draining(time=3.0, workers=["a"], node=None, reason="", deadline_s=None)
    forming = events.ReplicaForming(time=3.0, formed=4, replica=0, workers=["a"])
    fault = events.FaultFired(time=3.0, fault="kill@3:1", step=3, worker="c")
    now = [started(2.0, 2), joined("a"), joined("b"), joined("c")]
    now += [forming, drain, leave, fault, lost("c"), lost("d", LINK), lost("e", PATH)]
    now += [met("other_seat", "taken"), met("other_seat", "told"), met("new_process", "taken")]
    rosters = [regrouped(4.0, 2, 2, "restore"), regrouped(5.0, 3, 4, "repeat")]
    steps = [step(0, 1, 1.1), step(1, 1, 1.2), step(2, 2, 4.1), step(3, 2, 4.2), step(4, 3, 5.1)]
    known = replay_of(write(tmp_path, [*before, *now, *rosters], steps), 2)
    assert known.started == 3
    assert known.workers.keys() == {"a", "b"} and known.workers["a"].node == "n-a"
    assert known.draining == {"b"} and known.draining_nodes == {"n-b"}
    assert known.leaving == {"a"}
    assert known.shunned_nodes == {"n-d", "n-e", "n-b", "other_seat taken"}
    assert (known.generation, known.restored, known.formations) == (3, 2, 4)
    assert known.began == 4
    assert known.recorded == 5 and known.fired == ("kill@3:1",)


def test_whose_process_cannot_be_told_from_another_one_is_none_of_the_run(tmp_path: Path) -> None:
    """Somebody else has written it: it would have any process of that id ended."""
    planted = [replace(joined(worker), pid=4711, born_ticks=None) for worker in "ab"]
    happened = [started(0.0), joined("a"), *planted, lost("b", HANG), lost("c", NODE)]
    known = replay_of(write(tmp_path, happened, []), 0)
    assert known.workers == {"a": joined("a")} and not known.written_off


@pytest.mark.parametrize(
    ("since", "is_lost", "unheard"),
    [
        ([], {"b"}, {"c", "d"}),
        ([joined("c")], {"b"}, {"d"}),
        ([regrouped(3.0, 2, 4, "repeat")], {"b", "c", "d"}, set()),
        ([lost("c", CRASH)], {"b", "c"}, {"d"}),
        ([lost("a", HANG)], {"a", "b"}, {"c", "d"}),
        ([lost("a", HANG), regrouped(3.0, 2, 4, "repeat")], set("abcd"), set()),
        ([lost("a", PREEMPTION, slot="r0")], {"b"}, {"a", "c", "d"}),  # its machine was to go
        ([lost("a", PREEMPTION)], {"a", "b"}, {"c", "d"}),  # and it had left
    ],
)
def test_whom_a_coordinator_did_not_hear_is_lost_when_others_go_on_without(
    tmp_path: Path, since: list[events.Event], is_lost: set[str], unheard: set[str]
) -> None:
    happened = [started(0.0), *map(joined, "abcd"), regrouped(1.5, 1, 0, "start")]
    losses = [lost("b"), lost("c", NODE), lost("d", NODE)]
    known = replay_of(write(tmp_path, [*happened, *losses, *since], []), 0)
    assert known.lost == is_lost and known.unheard == unheard
    hung = {e.worker for e in since if isinstance(e, events.WorkerLost) and e.cause == HANG}
    stood = any(isinstance(event, events.RegroupDone) for event in since)
    assert known.written_off.keys() == (set() if stood else hung), "nobody has seen it end"
    assert known.workers.keys() == set("abcd") - is_lost


def test_what_became_of_suspect_machines_in_this_start(tmp_path: Path) -> None:
    def told(outcome: events.ReplacementOutcome) -> events.NodeReplacement:
        return events.NodeReplacement(
            time=1.0, node="n", machine="m", outcome=outcome, reason="", detail=""
        )

    before = [started(0.0), told("begun"), told("failed")]
    paths = write(tmp_path, [*before, started(0.5), told("held_back"), told("begun")], [])
    assert replay_of(paths, 0).replacements == (told("held_back"), told("begun"))
    assert replacements_begun(read_events(paths.events)) == [1.0, 1.0]


def trouble(last: int, action: Literal["warn", "stop", "skip_data"]) -> events.TrainingTrouble:
    return events.TrainingTrouble(
        time=3.0, trouble="loss_spike", first=last - 1, last=last, detail="", action=action
    )


def went_back(at: int) -> events.WentBack:
    return events.WentBack(time=4.0, step=at, before=9, reason="")


SKIP = trouble(5, "skip_data")


@pytest.mark.parametrize(
    ("since", "open_still"),
    [
        ([], [SKIP]),
        ([trouble(5, "warn"), regrouped(4.0, 2, 6, "repeat")], [SKIP, trouble(5, "warn")]),
        ([trouble(6, "stop")], [SKIP, trouble(6, "stop")]),
        ([went_back(4)], []),
        ([regrouped(4.0, 2, 5, "restore")], []),
        ([regrouped(4.0, 2, 6, "restore")], [SKIP]),  # its steps are not done again
        ([events.EndDecided(time=4.0, error="too many", cause=None)], []),
        ([events.RunEnded(time=4.0, step=6, outcome="failed", error="its driver is gone")], []),
    ],
)
def test_trouble_of_the_training_that_nothing_came_of_yet(
    tmp_path: Path, since: list[events.Event], open_still: list[events.TrainingTrouble]
) -> None:
    happened = [started(0.0), regrouped(1.0, 1, 0, "start"), SKIP, *since]
    assert list(replay_of(write(tmp_path, happened, []), 0).troubles) == open_still


def test_steps_that_were_given_up_do_not_count(tmp_path: Path) -> None:
    steps = [step(n, 1, 1.0 + n) for n in range(6)]
    rosters = [regrouped(0.5, 1, 0, "start"), regrouped(9.0, 2, 4, "restore")]
    known = replay_of(write(tmp_path, [started(0.0), *rosters], steps), 0)
    assert known.recorded == 4


def test_a_start_that_went_back_behind_its_first_step(tmp_path: Path) -> None:
    """The checkpoint that it was to go on from was damaged."""
    steps = [*(step(n, 1, 1.0 + n) for n in range(6)), step(4, 3, 9.1)]
    rosters = [regrouped(8.0, 2, 6, "start"), regrouped(9.0, 3, 4, "restore")]
    known = replay_of(write(tmp_path, [started(7.0, 6), *rosters], steps), 6)
    assert (known.recorded, known.restored) == (5, 3)


def test_a_run_that_was_asked_to_end(tmp_path: Path) -> None:
    asked = events.StopRequested(time=2.0, reason="SIGINT")
    happened = [started(0.0), regrouped(1.0, 1, 0, "start"), asked]
    known = replay_of(write(tmp_path, happened, []), 0)
    assert (known.winding_down, known.until) == (True, None), "no roster knows of it yet"
    # Its clock was set back, or it is of a coordinator on another machine.
    known = replay_of(write(tmp_path, [regrouped(1.9, 2, 4, "boundary")], []), 0)
    assert (known.winding_down, known.until) == (True, 4)
    known = replay_of(write(tmp_path, [started(9.0, 4)], []), 4)
    assert (known.winding_down, known.until) == (False, None), "it was continued since"


def test_before_the_first_roster_there_is_nothing(tmp_path: Path) -> None:
    known = replay_of(write(tmp_path, [started(0.0, 7), joined("a")], []), 7)
    assert (known.generation, known.recorded, known.formations) == (0, 7, 0)


def test_what_was_given_up_and_passed_over(tmp_path: Path) -> None:
    """Until a roster has gone back, the next coordinator has to see to it."""

    def back(step: int, skip: list[int]) -> events.WentBack:
        return events.WentBack(time=1.0, step=step, before=9, reason="", skip=skip)

    earlier = [started(0.0), back(2, [1, 1])]  # the manifest that the next start read has these
    happened = [*earlier, started(0.5), back(4, [6, 50]), regrouped(2.0, 2, 4, "restore")]
    known = replay_of(write(tmp_path / "done", happened, []), 0)
    assert (known.skips, known.going_back) == ((Skip(6, 50),), None)
    happened += [back(4, []), back(3, [7, 50]), regrouped(3.0, 3, 8, "repeat")]
    known = replay_of(write(tmp_path / "pending", happened, []), 0)
    assert (known.skips, known.going_back) == ((Skip(6, 50), Skip(7, 50)), 3)


def test_what_was_saved(tmp_path: Path) -> None:
    def saved(step: int) -> events.CheckpointCommitted:
        return events.CheckpointCommitted(time=1.0, step=step, generation=1, bytes=1, seconds=1.0)

    def back(step: int) -> events.WentBack:
        return events.WentBack(time=1.0, step=step, before=9, reason="")

    cases: list[tuple[int, list[events.Event], int]] = [
        (0, [], 0),
        (4, [], 4),
        (4, [saved(6)], 6),
        (0, [saved(6), back(2)], 2),
        (0, [saved(6), back(0)], 0),
        (0, [saved(6), back(0), saved(3)], 3),
    ]
    for number, (start, happened, expected) in enumerate(cases):
        paths = write(tmp_path / str(number), [started(0.0, start), *happened], [])
        assert replay_of(paths, start).saved == expected
