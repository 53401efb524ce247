"""A whole copy of the model out of the survivors of broken replicas. Pure.

When every replica has lost a worker, but not all of them the same shard, the living hold every
shard between them, at the step in progress: nothing has to be loaded, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.membership.conclusion import find_holders
from elastic.messages import Report


def plan_salvage(reports: Sequence[Report], workers_per_replica: int, *, since: int) -> list[str]:
    """The workers to put together, by rank; none where they do not hold a whole copy. They go on as
    `find_holders` says.

    Args:
        reports: of workers without a slot, with the state that each holds, if any.
        workers_per_replica: ranks to fill.
        since: see `find_holders`.
    """
    found: dict[int, str] = {}
    holders = find_holders(reports, since=since)
    for report in sorted(holders, key=lambda r: (-r.generation, -(r.step or 0))):
        found.setdefault(report.rank, report.identity.worker)
    if len(found) < workers_per_replica:
        return []
    return [found[rank] for rank in range(workers_per_replica)]
