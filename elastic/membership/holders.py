"""Who holds the state of the step in progress. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.messages import Report


def find_holders(reports: Iterable[Report]) -> list[Report]:
    """Those whose state is of the furthest step S that one who worked in the newest roster has.

    A worker of that roster at S - 1 that was in that step is as good: the one at S saw it
    committed, so the other holds its whole gradient. What a worker of an earlier roster holds of a
    step in progress is from an attempt that was given up, so it must be at S itself. Such a one may
    have left long ago, where the coordinator that knew is lost.
    """
    having = [report for report in reports if report.step is not None]
    newest = max((report.generation for report in having), default=0)
    furthest = max(
        (report.step or 0 for report in having if report.generation == newest), default=0
    )
    return [
        report
        for report in having
        if report.step == furthest
        or (report.step == furthest - 1 and report.in_step and report.generation == newest)
    ]
