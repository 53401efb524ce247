from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastic.protocol.causes import CRASH
from elastic.protocol.events import (
    CheckpointCommitted,
    CheckpointSkipped,
    Event,
    NodeChecking,
    RegroupDone,
    ReplicaForming,
    ReplicaHealed,
    RunEnded,
    RunStarted,
    SnapshotSkipped,
    SnapshotTaken,
    StepRecord,
    StopRequested,
    WorkerJoined,
    WorkerLost,
)
from elastic.reporting.progress import (
    ProgressPrinter,
    ProgressState,
    format_duration,
    format_event,
    format_progress,
)
from elastic.reporting.report import build_report, report_text

REPORT = build_report([], [])
STARTED = RunStarted(
    time=99.0, name="r", layout={"replicas": 2}, steps=100, start_step=0, versions={}
)
LOST = WorkerLost(
    time=103.0, worker="w3", node="n1", pid=4, slot="replica 1 shard 0 tensor 0", cause=CRASH,
    detail="exit code -9",
)  # fmt: skip
DONE = RegroupDone(
    time=103.75, generation=2, step=3, replicas=1, lanes={}, outcome="repeat", lost_steps=0,
    renumbered={}, repeated_steps=1,
)  # fmt: skip
ENDED = RunEnded(time=105.0, step=4, outcome="finished", error=None)
CHECKPOINT = CheckpointCommitted(time=102.5, step=2, generation=1, bytes=10, seconds=0.5)


def steps_at(*times: float, first: int = 0) -> list[StepRecord]:
    return [
        StepRecord(
            step=first + i, loss=2.0, grad_norm=1.0, lr=1e-3, tokens=6000, time=t, generation=1,
            replicas=2, sample_digests=[],
        )
        for i, t in enumerate(times)
    ]  # fmt: skip


def tell(printer: ProgressPrinter, steps: Sequence[StepRecord], events: Sequence[Event]) -> None:
    """By their times, and then what is due is shown, as the observer does."""
    records: list[Event | StepRecord] = [*events, *steps]
    for record in sorted(records, key=lambda record: record.time):
        if isinstance(record, StepRecord):
            printer.on_step(record)
        else:
            printer.on_event(record)
    printer.show()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_line_shows_what_is_known() -> None:
    state = ProgressState(
        step=60, steps=80, loss=2.12345, tokens_per_s=12_345.0, replicas=1, max_replicas=2,
        generation=3, seconds_left=75.2,
    )  # fmt: skip
    assert format_progress(state) == (
        "step 60/80 | loss 2.1235 | 12.3k tokens/s | replicas 1/2 | generation 3 | 1:15 left"
    )
    assert format_progress(ProgressState(steps=80)) == "step 0/80 | replicas 0/0 | generation 0"


def test_what_is_counted_bears_the_name_that_the_run_gives_it() -> None:
    """In the line and in the report; of a task without text no tokens."""
    for terms in ("tokens", "terms"):
        stream, started = io.StringIO(), replace(STARTED, terms=terms)
        printer, steps = ProgressPrinter(stream, is_tty=False), steps_at(100, 101)
        tell(printer, steps, [started])
        assert f"| 6.0k {terms}/s |" in stream.getvalue()
        text = report_text(build_report([started], steps))
        assert f"6,000 {terms}/s, 12,000 {terms}, " in text
        assert ("token" in text) == (terms == "tokens")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (6.6, "0:07"), (754, "12:34"), (3723, "1:02:03")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_regroup_says_how_long_the_survivors_stood_still() -> None:
    assert format_event(DONE, last_commit=102.25) == (
        "generation 2: 1 replicas at step 3, repeat, 1 repeated, "
        "stalled 1.50 s since the last commit"
    )


RAISED = "Traceback (most recent call last):\n  File 'mine.py'\nValueError: spoilt\n"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            replace(LOST, detail=RAISED),
            "lost w3 (replica 1 shard 0 tensor 0): crash, ValueError: spoilt",
        ),
        (
            replace(ENDED, outcome="failed", error=f"user code raised:\n{RAISED}\n"),
            "run failed after 4 steps: user code raised: … ValueError: spoilt",
        ),
    ],
    ids=["lost", "failed"],
)
def test_a_traceback_is_its_exception(event: Event, line: str) -> None:
    """The whole comes with the error that the run ends with."""
    assert format_event(event) == line


def test_a_stop_says_what_it_waits_for() -> None:
    asked = StopRequested(time=103.0, reason="SIGINT")
    assert format_event(asked, 102.0) == "stopping after this step, with a checkpoint (SIGINT)"
    assert format_event(asked) == (
        "stopping after the first step, or, where none is under way, once the workers have "
        "started (SIGINT)"
    )


def test_everyday_events_have_no_line() -> None:
    assert format_event(STARTED) is None
    assert format_event(CHECKPOINT) is None


def test_a_log_gets_a_line_per_interval_and_notable_events_at_once() -> None:
    stream, clock = io.StringIO(), Clock()
    printer = ProgressPrinter(stream, is_tty=False, interval_s=5.0, clock=clock)
    tell(printer, steps_at(100.0, 101.0), [STARTED])
    clock.now = 1.0
    tell(printer, steps_at(102.0, first=2), [])
    healed = ReplicaHealed(
        time=104.0,
        generation=3,
        replica=1,
        source=0,
        bytes=2_000_000,
        seconds=0.25,
        catch_up_steps=2,
    )
    tell(printer, [], [LOST, DONE, healed, CHECKPOINT])
    clock.now = 5.0
    tell(printer, steps_at(104.5, first=3), [ENDED])
    assert stream.getvalue().splitlines() == [
        "step 2/100 | loss 2.0000 | 6.0k tokens/s | replicas 2/2 | generation 1 | 1:38 left",
        "checkpoint of 2 steps committed in 0.50 s",
        "lost w3 (replica 1 shard 0 tensor 0): crash, exit code -9",
        "generation 2: 1 replicas at step 3, repeat, 1 repeated, "
        "stalled 1.75 s since the last commit",
        "replica 1 healed from replica 0: 2.0 MB in 0.25 s, 2 steps made up for",
        "run finished after 4 steps",
        # 18,000 tokens in 4.5 s; steps of 1, 1 and 2.5 s, and 96 are left
        "step 4/100 | loss 2.0000 | 4.0k tokens/s | replicas 2/2 | generation 1 | 1:36 left",
    ]


def test_a_terminal_line_is_rewritten_and_stays_below_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream, clock = io.StringIO(), Clock()
    printer = ProgressPrinter(stream, is_tty=True, interval_s=0.0, clock=clock)
    tell(printer, steps_at(100.0, 101.0), [STARTED])
    line = stream.getvalue().removeprefix("\r\x1b[K")
    assert line == "step 2/100 | loss 2.0000 | 6.0k tokens/s"[:39]
    tell(printer, [], [LOST, CHECKPOINT])
    events = stream.getvalue().split("\r\x1b[K")[2]
    assert events == f"lost w3 (replica 1 shard 0 tensor 0): crash, exit code -9\n{line}"
    assert "checkpoint" not in stream.getvalue()
    printer.on_end(REPORT)
    assert stream.getvalue().endswith(f"\r\x1b[K{line}\n{report_text(REPORT)}\n")


def test_speed_is_measured_anew_after_going_back() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter(stream, is_tty=False, interval_s=0.0, clock=Clock())
    tell(printer, steps_at(100.0, 101.0, 102.0), [STARTED])
    tell(printer, steps_at(150.0, first=1), [])
    assert stream.getvalue().splitlines()[-1] == (
        "step 2/100 | loss 2.0000 | replicas 2/2 | generation 1"
    )


def test_nothing_is_printed_before_the_first_step() -> None:
    stream = io.StringIO()
    events: list[Event] = [STARTED]
    printer = ProgressPrinter(stream)
    tell(printer, [], events)
    assert stream.getvalue() == ""
    printer.on_end(REPORT)
    assert stream.getvalue() == report_text(REPORT) + "\n"


def joined(time: float) -> WorkerJoined:
    return WorkerJoined(time=time, worker=f"w{time}", node="n", pid=1, born_ticks=1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_tty", [False, True])
def test_before_the_first_step_each_stage_has_a_line(is_tty: bool) -> None:
    stream = Terminal() if is_tty else io.StringIO()
    now = [0.0]
    printer = ProgressPrinter(stream, clock=lambda: now[0])
    layout = {"replicas": 2, "shard": 2, "tensor": 1, "lanes": 2, "spares": 1}
    forming = ReplicaForming(time=1.0, formed=1, replica=0, workers=["w0"])
    stood = replace(DONE, generation=1, step=0, outcome="start", replicas=2)
    begun: list[Event] = [replace(STARTED, layout=layout), joined(1.0)]
    burn = NodeChecking(time=3.0, node="n1", check="matrix burn", number=1, total=3)
    arrive = [joined(2.0), *[joined(3.0)] * 3, burn]
    for event in [*begun, *arrive, forming, forming, stood, joined(3.5)]:
        printer.on_event(event)
        printer.show()
    for record in steps_at(4.0):
        printer.on_step(record)
    now[0] = 99.0
    printer.show()
    printer.on_event(joined(5.0))  # a lost one's successor starts no run
    printer.on_event(burn)
    printer.show()
    lines = stream.getvalue().replace("\r\x1b[K", "\n").strip().splitlines()
    assert lines == [
        "starting the workers: 1 of 5 workers there",
        "checking the machines (matrix burn): 5 of 5 workers there",
        "building the replicas: 5 of 5 workers there",
        "computing the first step: 5 of 5 workers there",
        "step 1/100 | loss 2.0000 | replicas 2/2 | generation 1",
        "node n1: matrix burn (1 of 3)",
        *["step 1/100 | loss 2.0000 | replicas 2/2 | generation 1"] * is_tty,
    ]


class FullDisk(io.StringIO):
    """Takes nothing while there is no room."""

    room = True

    def write(self, text: str) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "no room")
        return super().write(text)


def test_a_stream_that_takes_nothing_for_a_while_costs_lines_only() -> None:
    stream = FullDisk()
    printer = ProgressPrinter(stream, is_tty=False, interval_s=0.0, clock=Clock())
    stream.room = False
    tell(printer, steps_at(100.0), [STARTED, LOST])
    stream.room = True
    tell(printer, steps_at(104.0, first=1), [DONE])
    assert [line.split(" ", 1)[0] for line in stream.getvalue().splitlines()] == [
        "generation",
        "step",
    ]
    stream.close()
    printer.on_end(REPORT)


def test_snapshots_that_are_not_taken_are_told_of_once() -> None:
    """By the second step in a row: a single one may only have come too soon after the last."""
    stream = io.StringIO()
    printer = ProgressPrinter(stream, is_tty=False)
    taken = SnapshotTaken(time=1.0, step=4, generation=1, bytes=1, copies=1, seconds=0.1)
    for step in (2, 6, 6, 8, 8, 10, 12):
        if step == 6:
            printer.on_event(taken)
            assert stream.getvalue() == ""
        printer.on_event(SnapshotSkipped(time=1.0, step=step, reason="no room"))
    assert stream.getvalue() == "no snapshots of steps 6 and 8: no room\n"


@pytest.mark.parametrize("is_tty", [False, True])
def test_checkpoints_that_are_not_written_are_told_of_by_each_reason(is_tty: bool) -> None:
    stream = io.StringIO()
    printer = ProgressPrinter(stream, is_tty=is_tty)
    for step, reason in ((2, "refused"), (4, "refused"), (6, "no room"), (8, "refused")):
        printer.on_event(CheckpointSkipped(time=1.0, step=step, reason=reason))
    told = [
        "checkpoint of 2 steps NOT WRITTEN: refused",
        "checkpoint of 6 steps NOT WRITTEN: no room",
        "checkpoint of 8 steps NOT WRITTEN: refused",
    ]
    assert stream.getvalue().replace("\r\x1b[K", "").splitlines() == told
    for step in (10, 12):
        printer.on_event(replace(CHECKPOINT, step=step))
    printer.on_event(CheckpointSkipped(time=1.0, step=14, reason="refused"))
    told.append("checkpoint of 10 steps committed in 0.50 s: saving works again")
    if not is_tty:
        told.append("checkpoint of 12 steps committed in 0.50 s")
    told.append("checkpoint of 14 steps NOT WRITTEN: refused")
    assert stream.getvalue().replace("\r\x1b[K", "").splitlines() == told
