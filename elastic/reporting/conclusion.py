"""The end of a run's records: how it ended, and its report."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from elastic.protocol.events import Event, RunEnded, RunOutcome, StepRecord
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.supervisor_api import Ending
from elastic.reporting.event_log import (
    EventLog,
    has_begun,
    last_event,
    last_step,
    read_events,
    read_steps,
)
from elastic.reporting.report import Report, build_report, write_report

log = logging.getLogger(__name__)


def recorded_ending(paths: RunPaths) -> Ending | None:
    """How a run has ended; None where its records have no end."""
    ended = last_event(paths.events)
    return ending_of(ended) if isinstance(ended, RunEnded) else None


def ending_of(ended: RunEnded) -> Ending:
    """What the last event of a run says to those who wait for its end."""
    interrupted = ended.outcome == "interrupted"
    return Ending(error=ended.error, cause=ended.cause, interrupted=interrupted)


def record_end(paths: RunPaths, began: float, outcome: RunOutcome, error: str | None) -> None:
    """Writes down how a run has ended whose coordinator is gone for good; for its supervisor.
    Nothing where the records have an end, or have not come to the start that `began` then.

    Raises:
        OSError: the storage refuses.
    """
    if not has_begun(paths.events, began) or recorded_ending(paths) is not None:
        return
    last = last_step(paths.steps, lambda _: True, lenient=True)
    step = 0 if last is None else last.step + 1
    with EventLog(paths.events) as records:
        records.append(RunEnded(time=time.time(), step=step, outcome=outcome, error=error))


def conclude(paths: RunPaths) -> Report:
    """Writes `report.json`, `report.txt` and `run.png` from the records. A disk that is full costs
    the files, and a damaged line what it held, not the run's outcome."""
    happened = read_events(paths.events, lenient=True)
    steps = read_steps(paths.steps, digests=False, lenient=True)
    report = build_report(happened, steps)
    try:
        write_report(paths.root, report)
    except OSError as error:
        log.warning("the report is printed, but not written whole: %s", error)
    if steps:
        _draw(paths, report, steps, happened)
    return report


def _draw(
    paths: RunPaths, report: Report, steps: Sequence[StepRecord], happened: Sequence[Event]
) -> None:
    try:
        from elastic.reporting.picture import draw  # matplotlib, which only an end needs

        draw(paths.root, report, steps, happened)
    except Exception as error:  # matplotlib has settings of its own, which a machine may have wrong
        log.warning("the run has no picture: %r", error)
