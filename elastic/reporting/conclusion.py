"""The end of a run's records: how it ended, and its report."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from elastic.protocol.events import Event, RunEnded, StepRecord
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.supervisor_api import Ending
from elastic.reporting.event_log import last_event, read_events, read_steps
from elastic.reporting.report import Report, build_report, write_report

log = logging.getLogger(__name__)


def recorded_ending(paths: RunPaths) -> Ending | None:
    """How a run has ended; None where its records have no end."""
    ended = last_event(paths.events)
    return Ending(error=ended.error, cause=ended.cause) if isinstance(ended, RunEnded) else None


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
