"""The driver's view of a run: the progress line and TensorBoard while it goes on, the report at its
end."""

from __future__ import annotations

import logging
import sys
import threading

import ray

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events, read_steps
from elastic.reporting.picture import draw
from elastic.reporting.progress import ProgressPrinter
from elastic.reporting.report import Report, build_report, report_text, write_report
from elastic.reporting.tensorboard import TensorBoardLog

log = logging.getLogger(__name__)

_INTERVAL_S = 0.25


class Observer:
    """Follows the coordinator's records on a thread of the driver.

    Args:
        coordinator: the run's coordinator actor.
        paths: the run directory.
    """

    def __init__(self, coordinator: Remote[CoordinatorApi], paths: RunPaths) -> None:
        self._coordinator = coordinator
        self._printer = ProgressPrinter(sys.stderr)
        self._dispatcher = TensorBoardLog(paths.tensorboard)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes in the last records and ends the thread."""
        self._over.set()
        self._thread.join()
        self._look()
        self._printer.close()
        self._dispatcher.close()

    def _follow(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            if not self._look():
                return

    def _look(self) -> bool:
        try:
            steps, happened = self._coordinator.call(CoordinatorApi.observe)
        except ray.exceptions.RayError as error:
            log.warning("the coordinator does not answer: %s", error)
            return False
        for view in (self._printer, self._dispatcher):
            try:
                view.update(steps, happened)
            except OSError as error:  # a full disk, or a terminal that is gone: the run goes on
                log.warning("%s lacks some steps: %s", type(view).__name__, error)
        return True


def conclude(paths: RunPaths) -> Report:
    """Writes `report.json`, `report.txt` and `run.png` from the records, and prints the report.
    A disk that is full costs the files, not the run's outcome."""
    happened, steps = read_events(paths.events), read_steps(paths.steps)
    report = build_report(happened, steps)
    try:
        write_report(paths.root, report)
        if steps:
            draw(paths.root, report, steps, happened)
    except OSError as error:
        log.warning("the report is printed, but not written whole: %s", error)
    print(report_text(report), file=sys.stderr, flush=True)
    return report
