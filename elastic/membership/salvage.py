"""A whole copy of the model out of the survivors of broken replicas. Pure.

When every replica has lost a worker, but not all of them the same shard, the living hold every
shard between them, at the step in progress: nothing has to be loaded, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.messages import Report


def plan_salvage(reports: Sequence[Report], workers_per_replica: int) -> list[str]:
    """The workers to put together, by rank; none where they do not hold a whole copy.

    They go on from the furthest step S that one who worked in the newest roster has. A worker of
    that roster at S - 1 that was in that step is as good: the one at S saw it committed, so the
    other holds its whole gradient. What a worker of an earlier roster holds of a step in progress
    is from an attempt that was given up, so it must be at S itself.

    Args:
        reports: of workers without a slot, with the state that each holds, if any.
        workers_per_replica: ranks to fill.
    """
    holders = [report for report in reports if report.step is not None]
    newest = max((report.generation for report in holders), default=0)
    last = [report for report in holders if report.generation == newest]
    furthest = max((report.step or 0 for report in last), default=0)
    found: dict[int, str] = {}
    for report in sorted(holders, key=lambda r: (-r.generation, -(r.step or 0))):
        in_commit = report.step == furthest - 1 and report.in_step and report in last
        if report.step == furthest or in_commit:
            found.setdefault(report.rank, report.identity.worker)
    if len(found) < workers_per_replica:
        return []
    return [found[rank] for rank in range(workers_per_replica)]
