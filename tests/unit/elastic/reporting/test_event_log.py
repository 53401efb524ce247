"""The record files read whole and from their end, however long they are."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.causes import CRASH
from elastic.protocol.events import (
    CoordinatorStarted,
    Event,
    RegroupDone,
    RunEnded,
    RunStarted,
    StepRecord,
    WorkerLost,
    step_from_json,
)
from elastic.reporting import event_log, record_lines
from elastic.reporting.event_log import (
    EventLog,
    RecordError,
    find_end,
    last_step,
    present_start,
    read_events,
    read_steps,
    recent_steps,
)
from elastic.reporting.follower import Follower
from elastic.reporting.report import build_report


def record(step: int, at: float, generation: int = 1) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, time=at, generation=generation,
        replicas=2, sample_digests=[1],
    )  # fmt: skip


def write(path: Path, records: list[StepRecord]) -> Path:
    path.unlink(missing_ok=True)
    with EventLog(path) as log:
        for each in records:
            log.append(each)
    return path


def histories() -> st.SearchStrategy[list[StepRecord]]:
    """A run that goes back now and then, to any step that it has done. Clocks say nothing: that of
    the machine which leads next may be behind."""

    def play(moves: list[tuple[int, int]]) -> list[StepRecord]:
        records: list[StepRecord] = []
        step = 0
        for generation, (back, onward) in enumerate(moves, start=1):
            step = max(0, step - back)
            for _ in range(onward):
                records.append(record(step, -float(len(records)), generation))
                step += 1
        return records

    return st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=8).map(play)


@given(histories())
def test_of_each_step_the_record_that_counts_stays(
    tmp_path_factory: pytest.TempPathFactory, records: list[StepRecord]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "steps.jsonl", records)
    counting = [
        r for i, r in enumerate(records) if not any(s.step <= r.step for s in records[i + 1 :])
    ]
    assert read_steps(path) == counting
    for most in range(max([0, *(r.step for r in records)])):
        from_the_end = next((r for r in reversed(records) if r.step <= most), None)

        def counts(found: StepRecord, most: int = most) -> bool:
            return found.step <= most

        assert last_step(path, counts) == from_the_end


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 18])
@pytest.mark.parametrize("torn", ["", '{"step": 9'])
def test_the_end_of_a_file_is_found_in_blocks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, torn: str
) -> None:
    monkeypatch.setattr(record_lines, "_BLOCK_BYTES", block)
    records = [record(step, float(step)) for step in range(4)]
    path = write(tmp_path / "steps.jsonl", records)
    with path.open("a") as file:
        file.write(torn)
    seen: list[StepRecord] = []

    def look(found: StepRecord) -> bool:
        seen.append(found)
        return False

    assert last_step(path, look) is None
    assert seen == records[::-1]
    EventLog(path).close()
    assert read_steps(path) == records
    assert path.read_text().endswith("}\n")


def test_without_a_record_there_is_no_last_one(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert last_step(path, lambda _: True) is None
    path.write_text("torn")
    assert last_step(path, lambda _: True) is None
    EventLog(path).close()
    assert path.read_text() == ""


def test_a_damaged_line_is_named_from_either_end(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", [record(step, float(step)) for step in range(3)])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"step": 1}\n' + lines[2])
    assert last_step(path, lambda _: True) == record(2, 2.0)
    for read in (read_steps, lambda path: last_step(path, lambda r: r.step == 0)):
        with pytest.raises(RecordError, match=r"steps\.jsonl:2: a step record lacks fields"):
            read(path)
    assert last_step(path, lambda r: r.step == 0, lenient=True) == record(0, 0.0)


def test_what_no_file_can_hold_is_replaced_in_what_is_told(tmp_path: Path) -> None:
    """The name of a file that is no UTF-8, in the text of an error: the loss was in no record."""
    path = tmp_path / "events.jsonl"
    lost = WorkerLost(
        time=1.0, worker="w1", node="n", pid=1, slot=None, cause=CRASH,
        detail="cannot decode " + os.fsdecode(b"caf\xe9.png"),
    )  # fmt: skip
    with EventLog(path) as log:
        log.append(lost)
        log.append(replace(lost, worker="w2"))
    expected = replace(lost, detail="cannot decode caf?.png")
    assert read_events(path) == [expected, replace(expected, worker="w2")]


def seconds_of(path: Path, steps: int) -> float:
    """CPU time of the end of a run in which every twentieth step loses a worker, of which nobody
    is replaced."""
    records = [record(step, 1.0 + step) for step in range(steps)]
    write(path, records)
    happened: list[Event] = [
        RunStarted(time=0.5, name="r", layout={}, steps=steps, start_step=0, versions={})
    ]
    for number, step in enumerate(range(10, steps, 20), start=2):
        lost = WorkerLost(
            time=step + 1.5, worker=f"w{step}", node="n", pid=1, slot="replica 1, rank 0",
            cause=CRASH, detail="",
        )  # fmt: skip
        done = RegroupDone(
            time=step + 1.6, generation=number, step=step, replicas=1, lanes={}, outcome="repeat",
            renumbered={}, lost_steps=1, repeated_steps=0,
        )  # fmt: skip
        happened += [lost, done]
    began = time.process_time()
    report = build_report(happened, read_steps(path))
    spent = time.process_time() - began
    assert (len(report.incidents), report.lost_steps) == (steps // 20, steps // 20)
    return spent


def test_the_end_of_a_long_run_takes_no_more_than_its_length(tmp_path: Path) -> None:
    """It grew with the square: 76 s at 100,000 steps."""
    path = tmp_path / "steps.jsonl"
    short, long = (min(seconds_of(path, steps) for _ in range(2)) for steps in (1_000, 16_000))
    assert long < 64 * short, f"16 times the steps took {long / short:.0f} times as long"


def test_a_long_run_of_many_lanes_is_not_held_whole(tmp_path: Path) -> None:
    """Neither where the report reads it, nor where a driver passes over what is there."""
    steps, lanes = 1_000, 512
    records = [
        replace(record(step, float(step)), sample_digests=[2**40] * lanes) for step in range(steps)
    ]
    path = write(tmp_path / "steps.jsonl", records)
    held = peak_bytes(lambda: read_steps(path, digests=False))
    assert held < path.stat().st_size / 4
    assert peak_bytes(lambda: Follower(path, step_from_json)) < held
    assert read_steps(path, digests=False)[-1] == replace(records[-1], sample_digests=[])
    assert read_steps(path)[-1] == records[-1]


def peak_bytes(action: Callable[[], object]) -> int:
    """The most that Python has allocated meanwhile."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(histories(), st.integers(1, 9))
def test_the_latest_steps_before_one_are_those_that_count(
    tmp_path_factory: pytest.TempPathFactory, records: list[StepRecord], count: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "steps.jsonl", records)
    newest = records[-1].step + 1 if records else 0
    for before in range(newest + 1):
        counting = [step for step in read_steps(path) if step.step < before]
        assert recent_steps(path, before, count) == counting[-count:]


def test_a_damaged_step_ends_the_latest_steps_and_no_more_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "steps.jsonl", [record(step, float(step)) for step in range(1_000)])
    lines = path.read_bytes().splitlines(keepends=True)
    lines[994] = b"\0" * 64 + b"\n"
    path.write_bytes(b"".join(lines))
    looked_at, step_of = list[bytes](), event_log._step_of

    def noted(line: bytes) -> StepRecord | None:
        looked_at.append(line)
        return step_of(line)

    monkeypatch.setattr(event_log, "_step_of", noted)
    assert [one.step for one in recent_steps(path, 998, 8)] == [995, 996, 997]
    assert len(looked_at) == 7, "two later ones, those, the damaged one and the one before it"


def test_what_an_earlier_start_left_says_nothing_of_this_one(tmp_path: Path) -> None:
    """Its coordinator or its supervisor may be lost before this one has written a line."""

    def begun(time: float) -> RunStarted:
        return RunStarted(time=time, name="r", layout={}, steps=9, start_step=0, versions={})

    def append(*happened: Event) -> None:
        with EventLog(path) as log:
            for event in happened:
                log.append(event)

    path = tmp_path / "events.jsonl"
    assert (present_start(read_events(path), 1.5), find_end(path, 1.5)) == ([], None)
    came_up = CoordinatorStarted(time=1.6, pid=1, anew=False)
    stopped = RunEnded(time=1.9, step=4, outcome="stopped", error=None)
    append(begun(1.5), came_up)
    assert (present_start(read_events(path), 1.5), find_end(path, 1.5)) == (
        [begun(1.5), came_up],
        None,
    )
    append(stopped)
    assert find_end(path, 1.5) == stopped
    assert (present_start(read_events(path), 2.5), find_end(path, 2.5)) == ([], None)
    append(begun(2.5))
    assert (present_start(read_events(path), 2.5), find_end(path, 2.5)) == ([begun(2.5)], None)
    assert (present_start(read_events(path), 1.5), find_end(path, 1.5)) == ([], None)
