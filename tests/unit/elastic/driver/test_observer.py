"""What callbacks are told of a run's files, and that none of them can harm the run."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic import Callback
from elastic.driver.observer import CLOCKS_S, Observer
from elastic.protocol.events import Evaluated, Event, RunEnded, RunStarted, StepRecord
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import EventLog
from elastic.reporting.report import Report
from tests.support.watching import wait_until

STARTED = RunStarted(
    time=0.0, name="run", layout={"replicas": 1}, steps=9, start_step=0, versions={}
)
EVALUATED = Evaluated(time=2.5, step=2, val_loss=3.0, tokens=10)
ENDED = RunEnded(time=9.0, step=4, outcome="failed", error="why")


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=2.0, grad_norm=1.0, lr=1e-3, tokens=100, time=1.0 + step, generation=1,
        replicas=1, sample_digests=[],
    )  # fmt: skip


Record = StepRecord | Event


class Diary(Callback):
    """Keeps all that it was told, and on which threads."""

    def __init__(self, full: int) -> None:
        self.told: list[Record | Report] = []
        self.threads: set[str] = set()
        self.full, self.is_full = full, threading.Event()

    def on_step(self, record: StepRecord) -> None:
        self._write(record)

    def on_event(self, event: Event) -> None:
        self._write(event)

    def on_end(self, report: Report) -> None:
        self._write(report)

    def _write(self, what: Record | Report) -> None:
        self.told.append(what)
        self.threads.add(threading.current_thread().name)
        if len(self.told) == self.full:
            self.is_full.set()


class Broken(Callback):
    """Raises the first time that it is called."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def on_step(self, record: StepRecord) -> None:
        self.calls += 1
        raise self.error

    def on_end(self, report: Report) -> None:
        self.calls += 1


class Deaf(Callback):
    """Overrides nothing."""


class Files:
    """The records as the coordinator writes them."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root=root)
        self.events, self.steps = EventLog(self.paths.events), EventLog(self.paths.steps)

    def write(self, *records: Record) -> None:
        for record in records:
            (self.steps if isinstance(record, StepRecord) else self.events).append(record)

    def close(self) -> None:
        self.events.close()
        self.steps.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path)
    yield files
    files.close()


def test_callbacks_are_told_while_the_run_goes_on_and_of_its_end(files: Files) -> None:
    diary = Diary(full=4)
    observer = Observer(files.paths, (diary, Deaf()))
    observer.start()
    first: list[Record] = [STARTED, step_record(0), step_record(1), EVALUATED]
    files.write(*first)
    assert diary.is_full.wait(60)
    files.write(step_record(2), step_record(3), ENDED)
    report = observer.finish()
    assert report.outcome == "failed"
    assert diary.told == [*first, step_record(2), step_record(3), ENDED, report]
    assert diary.threads == {"observer"}


def test_events_and_steps_come_by_their_times(files: Files) -> None:
    diary = Diary(full=0)
    observer = Observer(files.paths, (diary,))
    again = [step_record(1), step_record(2)]  # it went back; the lead has another clock now
    written: list[Record] = [step_record(1), EVALUATED, step_record(2), *again, ENDED]
    files.write(*written)
    observer.start()
    observer.finish()
    assert diary.told[:-1] == written


def test_who_attaches_is_told_where_the_run_is_without_all_that_happened(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run of months there are a million events."""
    files.write(STARTED, step_record(0), step_record(1))
    with files.paths.events.open("a") as file:
        file.write('{"kind": "steps_timed", "seconds": ' + "[" * 200_000 + "\n")
    Observer(files.paths, (), attaches=True, tensorboard=False)._look()
    assert "step 2/" in capsys.readouterr().err


def test_an_earlier_start_of_the_run_is_not_told_again(files: Files) -> None:
    files.write(STARTED, step_record(0))
    diary = Diary(full=0)
    observer = Observer(files.paths, (diary,))
    files.write(step_record(1), ENDED)
    observer.start()
    report = observer.finish()
    assert diary.told == [step_record(1), ENDED, report]
    assert report.steps == 2  # of all starts


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3)], ids=repr)
def test_one_that_raises_is_named_once_and_called_no_more(
    files: Files, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    broken, diary = Broken(error), Diary(full=0)
    observer = Observer(files.paths, (broken, diary))
    files.write(STARTED, step_record(0), step_record(1), ENDED)
    observer.start()
    report = observer.finish()
    assert broken.calls == 1
    assert diary.told == [STARTED, step_record(0), step_record(1), ENDED, report]
    (logged,) = caplog.records
    assert "callback Broken is not called any more" in logged.getMessage()
    assert logged.exc_info is not None and logged.exc_info[1] is error


def test_the_progress_line_tensorboard_and_the_report_are_there(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = Observer(files.paths, ())
    observer.start()
    files.write(STARTED, *(step_record(step) for step in range(4)))
    printed = []

    def shows_the_last_step() -> bool:
        printed.append(capsys.readouterr().err)
        return "step 4/9 | loss 2.0000" in "".join(printed)

    wait_until(shows_the_last_step, 30.0)
    files.write(ENDED)
    observer.finish()
    assert "run failed after 4 steps: why" in capsys.readouterr().err.splitlines()
    curves = EventAccumulator(str(files.paths.tensorboard))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss")] == [0, 1, 2, 3]
    assert {"report.json", "report.txt", "run.png"} <= {p.name for p in files.paths.root.iterdir()}


def test_tensorboard_gets_what_came_while_nobody_was_attached(files: Files) -> None:
    """Whoever attaches, or runs the next start, draws it: by the time of the last point."""
    first = Observer(files.paths, ())
    first.start()
    files.write(STARTED, step_record(0), step_record(1))
    first.finish()
    for file in files.paths.tensorboard.iterdir():
        os.utime(file, (step_record(1).time + CLOCKS_S,) * 2)
    files.write(step_record(2), EVALUATED, step_record(3))
    second = Observer(files.paths, (), attaches=True)
    second.start()
    files.write(step_record(4), ENDED)
    second.finish()
    curves = EventAccumulator(str(files.paths.tensorboard))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss")] == [0, 1, 2, 3, 4]
    assert [point.step for point in curves.Scalars("val_loss")] == [2]


def test_a_storage_that_refuses_at_the_start_costs_tensorboard_alone_what_came_before(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def refuses(path: Path, since: float) -> list[StepRecord]:
        asked.set()
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("elastic.driver.observer.steps_after", refuses)
    diary = Diary(full=2)
    observer = Observer(files.paths, (diary,))
    observer.start()
    files.write(STARTED, step_record(0))
    assert diary.is_full.wait(60) and asked.is_set()
    files.write(ENDED)
    assert observer.finish().outcome == "failed"


def test_a_report_that_cannot_be_written_is_printed(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(STARTED, ENDED)
    (files.paths.root / "report.txt").mkdir()  # an OSError, as that of a full disk
    observer = Observer(files.paths, ())
    observer.start()
    assert observer.finish().name == "run"
    assert "failed" in capsys.readouterr().err


def test_records_that_cannot_be_read_are_an_error_at_the_end(files: Files) -> None:
    observer = Observer(files.paths, ())
    observer.start()
    files.paths.steps.unlink()
    files.paths.steps.mkdir()
    with pytest.raises(IsADirectoryError):
        observer.finish()


def test_a_damaged_line_costs_what_it_held(files: Files) -> None:
    """The run lives on with it: it can be attached to, and ends with a report."""
    files.write(STARTED)
    for path in (files.paths.events, files.paths.steps):
        with path.open("a") as file:
            file.write("{oh\n")
    observer = Observer(files.paths, (), attaches=True)
    observer.start()
    files.write(ENDED)
    assert observer.finish().name == "run"
