"""A whole copy of the model out of the survivors of broken replicas. Pure.

When every replica has lost a worker, but not all of them the same shard, the living hold every
shard between them, at the step in progress: nothing has to be loaded, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.membership.conclusion import find_states
from elastic.protocol.messages import Report


def find_copy(reports: Iterable[Report], workers_per_replica: int, *, since: int) -> list[Report]:
    """Those who hold the newest state of which there is a whole copy; none where there is none.

    It need not be the furthest: one may have seen a commit, and have left before anybody else heard
    of it. The others repeated the step, and what they hold is as good. Nothing older than that is.

    Args:
        reports: of workers with the state that each holds, if any.
        workers_per_replica: ranks in a whole copy.
        since: see `find_states`.
    """
    furthest = 0
    for step, holders in find_states(reports, since=since):
        furthest = max(furthest, step)
        if step < furthest - 1:
            break
        if len({report.rank for report in holders}) == workers_per_replica:
            return holders
    return []


def plan_reassembly(
    reports: Sequence[Report], workers_per_replica: int, *, since: int
) -> list[str]:
    """The workers to put together, by rank; none where they do not hold a whole copy.

    Args:
        reports: of workers that are free to be put together.
        workers_per_replica: ranks to fill.
        since: see `find_states`.
    """
    holders = find_copy(reports, workers_per_replica, since=since)
    found: dict[int, str] = {}
    for report in sorted(holders, key=lambda r: (-r.generation, -(r.step or 0))):
        found.setdefault(report.rank, report.identity.worker)
    return [found[rank] for rank in sorted(found)]
