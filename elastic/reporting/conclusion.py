"""The end of a run's records: its report."""

from __future__ import annotations

import logging

from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events, read_steps
from elastic.reporting.report import Report, build_report, write_report

log = logging.getLogger(__name__)


def conclude(paths: RunPaths) -> Report:
    """Writes `report.json`, `report.txt` and `run.png` from the records. A disk that is full costs
    the files, not the run's outcome."""
    happened, steps = read_events(paths.events), read_steps(paths.steps)
    report = build_report(happened, steps)
    try:
        write_report(paths.root, report)
        if steps:
            from elastic.reporting.picture import draw  # matplotlib, which only an end needs

            draw(paths.root, report, steps, happened)
    except OSError as error:
        log.warning("the report is printed, but not written whole: %s", error)
    return report
