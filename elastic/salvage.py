"""A whole copy of the model out of the survivors of broken replicas. Pure.

When every replica has lost a worker, but not all of them the same shard, the living hold every
shard between them, at the step in progress: nothing has to be loaded, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.messages import Report


def plan_salvage(
    reports: Sequence[Report], workers_per_replica: int, earlier: Sequence[Report] = ()
) -> list[str]:
    """The workers to put together, by rank; none where they do not hold a whole copy.

    They go on from the furthest step S that one of them has. A worker at S - 1 that was in its
    commit is as good: the one at S saw the step committed, so the other holds its whole gradient.

    Args:
        reports: of the survivors, with the state that each holds and the rank it held it in.
        workers_per_replica: ranks to fill.
        earlier: of survivors of rosters before the last one. What they hold of a step in progress
            is from an attempt that was given up, so only the same step is as good.
    """
    furthest = max((report.step for report in reports if report.step is not None), default=None)
    if furthest is None:
        return []
    found: dict[int, str] = {}
    for report in sorted(reports, key=lambda report: -(report.step or 0)):
        done = report.step == furthest
        if done or (report.step == furthest - 1 and report.in_step):
            found.setdefault(report.rank, report.identity.worker)
    for report in earlier:
        if report.step == furthest:
            found.setdefault(report.rank, report.identity.worker)
    if len(found) < workers_per_replica:
        return []
    return [found[rank] for rank in range(workers_per_replica)]
