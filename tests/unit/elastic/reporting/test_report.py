"""A hand-written run of eleven steps of 1 s: a crash, a continuation; expectations are by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.protocol.causes import CRASH, LINK
from elastic.protocol.events import (
    CheckpointCommitted,
    CheckpointSkipped,
    Evaluated,
    Event,
    FaultFired,
    NodeReplacement,
    Profiled,
    RegroupCalled,
    RegroupDone,
    RegroupGathered,
    ReplacementOutcome,
    ReplicaHealed,
    ReplicasCompared,
    RunEnded,
    RunOutcome,
    RunStarted,
    StepRecord,
    StepSkipped,
    StepsTimed,
    WorkerJoined,
    WorkerLost,
    WorkerRefused,
    event_from_json,
)
from elastic.reporting.report import build_report, report_text, write_report

SETTINGS = {"determinism": "strict", "strategy": "HYBRID_SHARD", "workers_per_node": "8"}
LAYOUT = {"replicas": 2, "shard": 1, "tensor": 1, "lanes": 2, "spares": 0}


def steps_at(*times: float) -> list[StepRecord]:
    return [
        StepRecord(
            step=i, loss=4.0 - i / 4, grad_norm=1.0, lr=1e-3, tokens=100, time=t, generation=1,
            replicas=2, sample_digests=[],
        )
        for i, t in enumerate(times)
    ]  # fmt: skip


def start(time: float, start_step: int = 0, redone_steps: int = 0) -> list[Event]:
    return [
        RunStarted(time=time, name="run", layout=LAYOUT, steps=11, start_step=start_step,
                   versions={"torch": "2.13.0"}, settings=SETTINGS, redone_steps=redone_steps),
        RegroupCalled(time=time, generation=1, reason="fault"),
        RegroupDone(time=time + 1, generation=1, step=start_step, replicas=2, lanes={},
                    renumbered={}, outcome="start", lost_steps=0, repeated_steps=0),
    ]  # fmt: skip


def crash(time: float, generation: int, step: int, lost_steps: int = 0) -> list[Event]:
    """Lost at `time`, called 0.25 s later, gathered 0.375 s after that, and regrouped 0.125 s after
    that."""
    return [
        FaultFired(time=time - 0.25, fault=f"kill@{step}", step=step, worker="w1"),
        WorkerLost(time=time, worker="w1", node="n", pid=1, slot="replica 1 shard 0 tensor 0",
                   cause=CRASH, detail="gone"),
        RegroupCalled(time=time + 0.25, generation=generation, reason="fault"),
        RegroupGathered(time=time + 0.625, generation=generation),
        RegroupDone(time=time + 0.75, generation=generation, step=step, replicas=1, lanes={},
                    outcome="restore" if lost_steps else "repeat", lost_steps=lost_steps,
                    renumbered={}, repeated_steps=0 if lost_steps else 1),
    ]  # fmt: skip


def ended(time: float, step: int = 11, outcome: RunOutcome = "finished") -> RunEnded:
    return RunEnded(time=time, step=step, outcome=outcome, error=None)


# Steps 0-4 at 103..107, a crash in step 5, which is committed at 111 instead of 108; a stop after
# step 6; continued 400 s later; step 8 takes 1.5 s for no reason.
EVENTS: list[Event] = [
    *start(100.0),
    StepSkipped(time=104.5, step=2, loss=math.nan, grad_norm=1.0),
    *crash(108.0, generation=2, step=5),
    ReplicaHealed(time=111.5, generation=3, replica=1, source=0, bytes=10, seconds=0.6,
                  catch_up_steps=4),
    CheckpointCommitted(time=112.5, step=7, generation=2, bytes=10, seconds=0.1),
    ended(113.0, step=7, outcome="interrupted"),
    *start(500.0, start_step=7),
    Evaluated(time=505.0, step=9, val_loss=2.25, tokens=50),
    ReplicasCompared(time=505.0, step=9, equal=True),
    ended(510.0),
]  # fmt: skip
STEPS = steps_at(103, 104, 105, 106, 107, 111, 112, 503, 504.5, 505.5, 506.5)


def test_replicas_without_lanes_are_in_the_report() -> None:
    report = build_report(EVENTS, STEPS)
    assert "compute nothing" not in report_text(report)
    grown = replace(report, layout={**LAYOUT, "replicas": 8})
    assert "  lanes      2 lanes keep 2 replicas at work: 6 of 8" in report_text(grown)


def test_a_run_is_summed_up() -> None:
    report = build_report(EVENTS, STEPS)
    assert (report.name, report.outcome) == ("run", "finished")
    assert (report.steps, report.planned_steps) == (11, 11)
    assert (report.first_loss, report.final_loss, report.val_loss) == (4.0, 1.5, 2.25)
    assert report.tokens == 1100
    assert report.wall_s == 13.0 + 10.0
    # Between commits: 4 x 1 s, 4 s, 1 s, then 1.5 s, 1 s, 1 s: 12.5 s for 9 steps.
    assert report.median_step_s == 1.0
    assert report.tokens_per_s == pytest.approx(900 / 12.5)
    assert report.longest_stall_s == 3.0
    assert report.effective_time == pytest.approx(1 - 3.0 / 12.5)
    assert (report.regroups, report.repeated_steps, report.lost_steps) == (1, 1, 0)
    assert (report.skipped_steps, report.faults_fired, report.checkpoints) == (1, 1, 1)
    assert (report.restarts, report.redone_steps) == (1, 0)
    assert report.replicas_equal is True
    assert [i.step for i in report.incidents] == [5]
    assert (report.layout, report.versions) == (LAYOUT, {"torch": "2.13.0"})
    assert report.settings == SETTINGS
    told = "  settings   determinism strict, strategy HYBRID_SHARD, workers_per_node 8\n"
    assert told in report_text(report)


def test_records_of_versions_that_noted_fewer_settings_are_read() -> None:
    noted = EVENTS[0].to_json()
    for older in ({**noted, "settings": {"compile": "off"}}, {**noted, "settings": None}):
        report = build_report([event_from_json(older)], [])
        assert report.settings == (older["settings"] or {})
    del noted["settings"]
    report = build_report([event_from_json(noted)], [])
    assert report.layout == LAYOUT
    assert "  settings   -\n" in report_text(report)


def test_checkpoints_that_are_not_in_the_run_directory_are_named() -> None:
    assert "saved in" not in report_text(build_report(EVENTS, STEPS))
    away = [replace(e, store="s3://b/run") if isinstance(e, RunStarted) else e for e in EVENTS]
    assert "  saved in   s3://b/run\n" in report_text(build_report(away, STEPS))


def test_a_start_with_other_versions_is_told() -> None:
    """Not one that begins from the seed again: its bits are of one kind."""
    assert "  changed " not in report_text(build_report(EVENTS, STEPS))

    def started(time: float, step: int, **versions: str) -> RunStarted:
        return RunStarted(time=time, name="run", layout=LAYOUT, steps=11, start_step=step,
                          versions=versions)  # fmt: skip

    starts = [
        started(1.0, 0, torch="2.11.0"),
        started(2.0, 0, torch="2.12.0"),
        started(3.0, 4, torch="2.12.0", elastictrainer="0.1.0"),
        started(4.0, 6, torch="2.13.0", elastictrainer="0.1.0"),
        started(5.0, 8, torch="2.13.0", elastictrainer="0.2.0"),
    ]
    report = build_report(starts, [])
    assert report.version_changes == (
        "from step 6 on: torch 2.12.0, now 2.13.0",
        "from step 8 on: elastictrainer 0.1.0, now 0.2.0",
    )
    assert (
        "  changed    from step 6 on: torch 2.12.0, now 2.13.0; from step 8 on: elastictrainer "
        in report_text(report)
    )


def test_a_store_that_no_record_names_is_not_known() -> None:
    """Of before 2026-11-26; empty would be the run's directory."""
    older = start(0.0)[0].to_json()
    del older["store"]
    assert build_report([event_from_json(older)], []).to_json()["store"] is None
    assert build_report([event_from_json({**older, "store": ""})], []).store == ""


def test_workers_that_got_no_place_for_their_versions_are_told_once_each() -> None:
    """A coordinator that is started anew refuses them again."""
    told = [
        WorkerRefused(time=t, worker=worker, node="n", detail=f"torch {t}")
        for t, worker in ((1.0, "w1"), (2.0, "w2"), (3.0, "w1"))
    ]
    report = build_report([*start(0.0), *told], [])
    assert report_text(report).endswith(
        "\nw1 on node n gets no place: torch 3.0\nw2 on node n gets no place: torch 2.0\n"
    )


def test_checkpoints_that_were_not_written_are_counted_once_each() -> None:
    skipped = [CheckpointSkipped(time=105.0, step=step, reason="refused") for step in (2, 4, 4, 6)]
    saved = CheckpointCommitted(time=106.0, step=4, generation=1, bytes=1, seconds=0.1)
    report = build_report([*start(100.0), *skipped, saved, ended(112.0)], STEPS)
    assert (report.checkpoints, report.skipped_checkpoints) == (1, 2)
    assert "checkpoints 1 and 2 NOT WRITTEN\n" in report_text(report)
    assert "NOT WRITTEN" not in report_text(build_report(EVENTS, STEPS))


def test_jitter_does_not_count_against_an_undisturbed_run() -> None:
    report = build_report([*start(100.0), ended(112.0)], steps_at(103, 104, 105.5, 106.2, 107.2))
    assert report.effective_time == 1.0
    assert report.longest_stall_s == pytest.approx(0.5)
    assert report.incidents == ()


def test_a_lost_spare_costs_nothing() -> None:
    spare = WorkerLost(time=104.5, worker="s", node="n", pid=1, slot=None, cause=CRASH, detail="")
    report = build_report([*start(100.0), spare], steps_at(103, 104, 105.2, 106.2, 107.2))
    assert report.effective_time == 1.0
    assert len(report.incidents) == 1
    assert report.outcome == "unfinished"


def test_the_time_of_lost_steps_is_not_effective() -> None:
    # Steps 2 and 3 were committed at 105 and 106, lost at 106.5, done again at 109 and 110.
    events = [*start(100.0), *crash(106.5, generation=2, step=2, lost_steps=2), ended(112.0)]
    report = build_report(events, steps_at(103, 104, 109, 110, 111))
    assert report.lost_steps == 2
    assert report.longest_stall_s == 2.0  # 5 s, less step 2 and two lost steps
    assert report.effective_time == pytest.approx(1 - 4.0 / 8.0)


def test_each_start_is_judged_by_its_own_steps_and_the_median_is_of_the_last_one() -> None:
    # Steps of 1 s with a crash that takes 3 s more; then in another layout of 5 s, with one of 2 s.
    events = [*start(100.0), *crash(107.5, 2, step=5), *start(500.0, 7), *crash(514.0, 2, step=9)]
    times = [103, 104, 105, 106, 107, 111, 112, 503, 508, 515, 520]
    report = build_report(events, steps_at(*times))
    assert report.median_step_s == 5.0
    assert report.longest_stall_s == 3.0
    assert [i.stall_s for i in report.incidents] == [3.0, 2.0]
    assert report.effective_time == pytest.approx(1 - (3.0 + 2.0) / (9.0 + 17.0))
    begun = build_report([*events, *start(900.0, 11)], steps_at(*times))
    assert (begun.median_step_s, begun.longest_stall_s) == (None, 3.0)
    assert "median step -\n" in report_text(begun)


def test_a_start_without_an_undisturbed_step_is_judged_by_the_others() -> None:
    # Steps of 1 s; after the resume one step, and a crash that takes 40 s more.
    events = [*start(100.0), *start(200.0, 6), *crash(203.2, 2, step=7)]
    report = build_report(events, steps_at(*range(103, 109), 203, 244))
    assert (report.median_step_s, report.longest_stall_s) == (1.0, 40.0)
    assert [i.stall_s for i in report.incidents] == [40.0]
    assert report.effective_time == pytest.approx(1 - 40.0 / 46.0)


def test_a_start_whose_line_is_lost_is_not_taken_with_the_next_one() -> None:
    events = [*start(100.0)[1:], *start(500.0, 3)]
    report = build_report(events, steps_at(103, 104, 105, 503, 505, 507))
    assert (report.median_step_s, report.longest_stall_s) == (2.0, 0.0)
    assert report.wall_s == 5.0 + 7.0


def test_a_regroup_for_growth_counts_as_disturbance() -> None:
    grow: list[Event] = [
        RegroupCalled(time=105.2, generation=2, reason="grow"),
        RegroupDone(time=105.6, generation=2, step=3, replicas=2, lanes={}, outcome="boundary",
                    renumbered={}, lost_steps=0, repeated_steps=0),
    ]  # fmt: skip
    report = build_report([*start(100.0), *grow], steps_at(103, 104, 105, 106.5, 107.5))
    assert report.effective_time == pytest.approx(1 - 0.5 / 4.5)
    assert (report.regroups, report.incidents) == (1, ())


def regroups(*times: float) -> list[Event]:
    """For faults with nobody lost, each 0.25 s long."""
    events: list[Event] = []
    for generation, time in enumerate(times, start=2):
        events += [
            RegroupCalled(time=time, generation=generation, reason="fault"),
            RegroupDone(time=time + 0.25, generation=generation, step=1, replicas=2, lanes={},
                        renumbered={}, outcome="repeat", lost_steps=0, repeated_steps=1),
        ]  # fmt: skip
    return events


def test_where_each_step_is_disturbed_the_time_after_the_last_regroup_is_that_of_a_step() -> None:
    # Ten seconds between commits; the last regroup in them is over a second before the commit.
    times = [begin + n for begin in (103, 113, 123, 133) for n in (1.0, 2.5, 8.75)]
    report = build_report([*start(100.0), *regroups(*times)], steps_at(103, 113, 123, 133, 143))
    assert report.median_step_s == 1.0
    assert report.longest_stall_s == 9.0
    assert report.effective_time == pytest.approx(1 - 36.0 / 40.0)


def test_regroups_after_the_last_step_and_before_the_first_count() -> None:
    # From the first roster (101) to the end of the regroup at 102, and from the last step to the
    # end of the last regroup, nothing was done that counts.
    events = [*start(100.0), *regroups(102.0, 105.5, 114.75), ended(116.0, 3, "failed")]
    report = build_report(events, steps_at(103, 104, 105))
    assert report.effective_time == pytest.approx(1 - (1.25 + 10.0) / (1.25 + 2.0 + 10.0))


def test_regroups_in_vain_and_the_loss_that_ends_them_count_together() -> None:
    # Steps a second apart; then two regroups in vain, 10 s of test, and one without the worker.
    lost = WorkerLost(time=128.0, worker="w1", node="n", pid=1, slot="replica 1 shard 0 tensor 0",
                      cause=LINK, detail="64 of 1,000 bytes")  # fmt: skip
    events = [*start(100.0), *regroups(110.0, 117.5), lost, *regroups(128.25), ended(132.0)]
    report = build_report(events, steps_at(103, 104, 105, 129.5, 130.5))
    (incident,) = report.incidents
    assert (incident.cause, incident.stall_s) == ("link", 23.5)
    assert report.regroups == 3
    assert report.effective_time == pytest.approx(1 - 23.5 / 27.5)


def test_a_run_that_never_came_to_a_step_was_of_no_effect() -> None:
    called = RegroupCalled(time=103.0, generation=4, reason="fault")
    events = [*start(100.0), *regroups(101.5, 102.25), called, ended(103.5, 0, "failed")]
    assert build_report(events, []).effective_time == 0.0


def test_two_crashes_in_one_gap_count_once() -> None:
    events = [*start(100.0), *crash(105.5, 2, step=3), *crash(106.5, 3, step=3)]
    report = build_report(events, steps_at(103, 104, 105, 108, 109, 110))
    assert len(report.incidents) == 2
    assert report.effective_time == pytest.approx(1 - 2.0 / 7.0)


def test_replicas_that_differ_once_are_not_equal() -> None:
    compared: list[Event] = [
        ReplicasCompared(time=1.0, step=i, equal=e) for i, e in enumerate([True, False, True])
    ]
    assert build_report(compared, []).replicas_equal is False


@pytest.mark.parametrize(("replicas", "equal"), [([1], None), ([1, 2], True), ([2, 1], True)])
def test_one_replica_alone_is_not_compared(replicas: list[int], equal: bool | None) -> None:
    compared: list[Event] = [
        ReplicasCompared(time=1.0, step=i, equal=True, replicas=n) for i, n in enumerate(replicas)
    ]
    assert build_report(compared, []).replicas_equal is equal


def test_nothing_at_all_still_makes_a_report() -> None:
    report = build_report([], [])
    assert (report.outcome, report.steps, report.wall_s) == ("unfinished", 0, 0.0)
    assert report.effective_time is None
    assert "unfinished" in report_text(report)


def test_the_text_names_the_facts_and_every_incident() -> None:
    text = report_text(build_report(EVENTS, STEPS))
    lines = text.splitlines()
    assert lines[0] == "run: finished, 11 of 11 steps in 23.0 s"
    assert "4.0000 → 1.5000, validation 2.2500" in text
    assert "76.00 % of the time, longest stall 3.000 s" in text
    header, _, row, _, meaning, _, verdict = lines[-7:]
    assert verdict == "step 5: crash, w1 (certain); remedy: new process: gone"
    assert meaning == "crash: its process ended"
    assert dict(zip(cells(header), cells(row), strict=True)) == {
        "step": "5",
        "cause": "crash",
        "lost": "replica 1 shard 0 tensor 0",
        "outcome": "repeat",
        "detect": "0.250 s",
        "decide": "0.250 s",
        "abort": "0.375 s",
        "roster": "0.125 s",
        "1st step": "2.250 s",  # from 108.75 to 111; the five are the 3.25 s from the fault on
        "stall": "3.000 s",
        "rejoin": "3.500 s",
        "heal": "0.600 s",
        "made up": "4",
        "redone": "1",
    }


def test_of_very_many_incidents_the_text_names_the_last_ones() -> None:
    report = build_report(EVENTS, STEPS)
    (incident,), (verdict,) = report.incidents, report.verdicts
    many = replace(
        report,
        incidents=tuple(replace(incident, step=step) for step in range(10_000)),
        verdicts=tuple(replace(verdict, step=step) for step in range(10_000)),
    )
    lines = report_text(many).splitlines()
    assert len(lines) < 150
    assert [line.split()[0] for line in lines if "replica 1 shard 0 tensor 0" in line] == [
        str(step) for step in range(9950, 10_000)
    ]
    assert [line.split(":")[0] for line in lines if ": crash, w1" in line] == [
        f"step {step}" for step in range(9950, 10_000)
    ]
    assert lines.count("(9950 before these, in report.json)") == 2
    assert len(many.to_json()["incidents"]) == 10_000


def test_steps_done_again_after_restarts_are_counted_and_a_run_started_once_says_nothing() -> None:
    again = [*start(100.0), *start(200.0, 3, redone_steps=2), *start(300.0, 5, redone_steps=1)]
    report = build_report(again, STEPS)
    assert (report.restarts, report.redone_steps) == (2, 3)
    assert "  restarts   2, 3 steps done again\n" in report_text(report)
    assert "restarts" not in report_text(build_report(start(100.0), STEPS))


def test_what_a_worker_does_the_parts_of_a_step_and_a_profile_are_told() -> None:
    counted = [
        replace(e, precision="bfloat16", flops_per_token={"6N": 6e9, "causal": 8e9})
        if isinstance(e, RunStarted)
        else e
        for e in EVENTS
    ]
    timed = StepsTimed(time=112.0, step=6, steps=5, seconds={"data": 0.002, "compute": 0.006})
    profiled = Profiled(
        time=112.0, worker="w0", node="n", first=3, last=5, file="/r/profile/t.json.gz",
        problem=None, operators=[{"name": "aten::mm", "calls": 8, "cpu_ms": 1.5, "gpu_ms": 20.25}],
        attention=["cudnn", "flash"],
        device_ms={"busy": 600.0, "collectives": 80.04, "exposed": 7.0},
    )  # fmt: skip
    h100 = WorkerJoined(time=1.0, worker="w", node="n", pid=1, born_ticks=1, device="NVIDIA H200")
    report = build_report([*counted, timed, profiled, h100], STEPS)
    # 100 tokens in 1 s on two workers.
    assert report.tokens_per_s_per_worker == pytest.approx(50)
    assert report.flops_per_s_per_worker == pytest.approx({"6N": 3e11, "causal": 4e11})
    assert report.mfu == pytest.approx({"6N": 3e11 / 989e12, "causal": 4e11 / 989e12})
    assert (report.timed_steps, report.step_parts_s) == (5, {"data": 0.002, "compute": 0.006})
    resumed = build_report([*counted, timed, *start(200.0, 7)], STEPS)
    assert (resumed.timed_steps, resumed.step_parts_s) == (0, {})
    text = report_text(report)
    assert "50 tokens/s, TFLOP/s 0.3 (6N), 0.4 (causal), MFU 0.0 % (6N), 0.0 % (causal)" in text
    rows = [cells(line) for line in text.splitlines()]
    assert ["data", "2.00", "25.00 %"] in rows and ["all", "8.00", "100.00 %"] in rows
    assert "profile of steps 3 to 5 on w0: /r/profile/t.json.gz\n" in text
    assert ["aten::mm", "8", "1.50", "20.25"] in rows
    assert "attention takes cudnn, flash\n" in text
    assert "worked for 600.0 ms; collectives ran for 80.0 of these, 7.0 with nothing" in text
    plain = report_text(build_report([*counted, replace(h100, device="")], STEPS))
    assert "TFLOP/s" in plain and "MFU" not in plain and "part" not in plain


def test_the_report_of_an_older_version_leaves_out_what_it_did_not_note() -> None:
    older = [e for e in EVENTS if not isinstance(e, RegroupGathered)]
    report = build_report(older, STEPS)
    header, _, row = report_text(report).splitlines()[-7:-4]
    cell = dict(zip(cells(header), cells(row), strict=True))
    assert (cell["abort"], cell["roster"]) == ("-", "0.500 s")
    assert report.effective_time == build_report(EVENTS, STEPS).effective_time


def test_how_it_ended_with_each_suspect_machine_is_told() -> None:
    outcomes: list[tuple[float, str, ReplacementOutcome]] = [
        (1.0, "a", "held_back"),
        (2.0, "b", "begun"),
        (3.0, "a", "cleared"),
        (4.0, "b", "failed"),
    ]
    told = [
        NodeReplacement(time=t, node=node, machine=f"i-{node}", outcome=outcome, reason="link: r",
                        detail=f"d{t}")
        for t, node, outcome in outcomes
    ]  # fmt: skip
    report = build_report([*start(0.0), *told], [])
    assert [(one.node, one.outcome) for one in report.replacements] == [
        ("a", "cleared"),
        ("b", "failed"),
    ]
    assert report_text(report).endswith(
        "suspect machine i-a (link: r): cleared: d3.0\n"
        "suspect machine i-b (link: r): failed: d4.0\n"
    )
    assert report.to_json()["replacements"][1]["machine"] == "i-b"


def cells(line: str) -> list[str]:
    """The columns of a table's line, which stand at least two blanks apart."""
    return re.split(r" {2,}", line)


def test_the_report_is_written_as_standard_json_and_text(tmp_path: Path) -> None:
    report = replace(build_report(EVENTS, STEPS), final_loss=math.nan)
    write_report(tmp_path, report)
    write_report(tmp_path, report)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "report.txt"]

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert data["final_loss"] == "nan"
    (incident,) = data["incidents"]
    assert incident["slots"] == ["replica 1 shard 0 tensor 0"]
    assert (incident["abort_s"], incident["roster_s"]) == (0.375, 0.125)
    assert (incident["heal_s"], incident["catch_up_steps"]) == (0.6, 4)
    assert list(data)[:3] == ["name", "outcome", "steps"]
    assert (tmp_path / "report.txt").read_text() == report_text(report)
