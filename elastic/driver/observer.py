"""The driver's view of a run: callbacks (progress line and TensorBoard are two), then the report.

It reads the run's files, so it misses nothing when their writer, the coordinator, is started anew.
"""

from __future__ import annotations

import heapq
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from elastic.protocol.events import (
    Evaluated,
    Event,
    RegroupDone,
    RunStarted,
    StepRecord,
    event_from_json,
    step_from_json,
)
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.callback import Callback
from elastic.reporting.conclusion import conclude
from elastic.reporting.event_log import last_events, last_step, read_events, steps_after
from elastic.reporting.follower import Follower
from elastic.reporting.progress import ProgressPrinter
from elastic.reporting.report import Report
from elastic.reporting.tensorboard import TensorBoardLog

log = logging.getLogger(__name__)

_INTERVAL_S = 0.5
CLOCKS_S = 60.0
"""By so much clocks may differ. What TensorBoard is told twice it shows once."""


class Observer:
    """Follows a run's files on a thread of the driver, and tells the callbacks.

    What the files hold by then is passed over: make it before the coordinator, for a run that is
    about to start. TensorBoard alone is told of what came while nobody wrote its files.

    Args:
        paths: the run directory.
        callbacks: the user's; the progress line and TensorBoard come before them.
        attaches: the run is going on, and the progress line says where it is.
        tensorboard: write TensorBoard's files; the run's driver does.
    """

    def __init__(
        self,
        paths: RunPaths,
        callbacks: Sequence[Callback],
        *,
        attaches: bool = False,
        tensorboard: bool = True,
    ) -> None:
        self.paths = paths
        boards = [TensorBoardLog(paths.tensorboard)] if tensorboard else []
        self._boards = [(board, board.written_until() - CLOCKS_S) for board in boards]
        """Since when nobody has written their files."""
        self._events = Follower(paths.events, event_from_json)
        self._steps = Follower(paths.steps, step_from_json)
        self._printer = ProgressPrinter(sys.stderr)
        self._callbacks: list[Callback] = [self._printer, *boards, *callbacks]
        if attaches:
            self._catch_up()
        self._over = threading.Event()
        self._report: Future[Report] = Future()

    def _catch_up(self) -> None:
        for event in last_events(self.paths.events, RunStarted, RegroupDone):
            self._printer.on_event(event)
        if (step := last_step(self.paths.steps, lambda _: True, lenient=True)) is not None:
            self._printer.on_step(step)

    def start(self) -> None:
        """Starts the thread; call `finish` some time."""
        threading.Thread(target=self._run, name="observer", daemon=True).start()

    def finish(self) -> Report:
        """Call it when the records are closed. Returns the report, of which the callbacks have been
        told by then."""
        self._over.set()
        return self._report.result()

    def _run(self) -> None:
        try:
            self._report.set_result(self._follow())
        except BaseException as error:  # for `finish` to raise
            self._report.set_exception(error)

    def _follow(self) -> Report:
        self._tell_boards()
        while not self._over.wait(_INTERVAL_S):
            self._look()
        self._look()
        report = conclude(self.paths)
        self._tell(report, self._callbacks)
        return report

    def _tell_boards(self) -> None:
        for board, since in self._boards:
            try:
                for record in _records_after(self.paths, since):
                    self._tell(record, [board])
            except OSError as error:  # the view of what comes must not end with it
                log.warning("TensorBoard lacks what came before: %s", error)

    def _look(self) -> None:
        # Events first: the steps that were recorded before one of them are read with it or earlier.
        happened = self._events.take()
        for record in _by_time(happened, self._steps.take()):
            self._tell(record, self._callbacks)
        self._printer.show()

    def _tell(self, what: Event | StepRecord | Report, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            if callback not in self._callbacks:
                continue
            try:
                _call(callback, what)
            except BaseException:  # SystemExit, too: on this thread it would end the view only
                name = type(callback).__qualname__
                log.warning("callback %s is not called any more: it raised", name, exc_info=True)
                self._callbacks = [one for one in self._callbacks if one is not callback]


def _records_after(paths: RunPaths, since: float) -> Iterator[Event | StepRecord]:
    """Steps and evaluations that were recorded later."""
    steps = steps_after(paths.steps, since)
    happened = read_events(paths.events, kinds=[Evaluated], lenient=True) if steps else []
    return _by_time([one for one in happened if one.time > since], steps)


def _by_time(
    happened: Sequence[Event], steps: Sequence[StepRecord]
) -> Iterator[Event | StepRecord]:
    """Both together by their times; each stays in its order, also where clocks differ."""
    return heapq.merge(happened, steps, key=lambda record: record.time)


def _call(callback: Callback, what: Event | StepRecord | Report) -> None:
    match what:
        case StepRecord():
            callback.on_step(what)
        case Report():
            callback.on_end(what)
        case _:
            callback.on_event(what)
