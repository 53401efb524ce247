"""What is left of replicas is made whole again. Pure.

Whoever survives in a replica that has lost a worker keeps its rank and its state, and follows the
others (docs/decisions/031). Another worker takes the rank that is lost. Where too few are idle for
that, the smallest remnant is given up for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from elastic.protocol.messages import Identity
from elastic.protocol.roster import Remnant, Replica
from trainer.parallel.layout import ParallelDims


def merge_remnants(
    remnants: Sequence[Remnant], idle: int, size: int
) -> tuple[list[Remnant], list[str]]:
    """Gives up as many of `remnants` as must be for one that can be made whole, if that is enough.

    Args:
        remnants: all whose replica is not being built.
        idle: workers without a place.
        size: workers in a whole replica.

    Returns:
        Those that are left, with the workers of the others whose ranks they lacked; and the other
        workers of those others, who are idle now.
    """
    left, freed = _largest_first(remnants), list[str]()
    if sum(len(remnant.workers) for remnant in left) + idle < size:
        return left, freed
    while len(left) > 1 and all(len(r.workers) + idle + len(freed) < size for r in left):
        for rank, worker in left.pop().workers.items():
            place = next((i for i, r in enumerate(left) if rank not in r.workers), None)
            if place is None:
                freed.append(worker)
            else:
                other = left[place]
                left[place] = replace(other, workers={**other.workers, rank: worker})
        left = _largest_first(left)
    return left, freed


def plan_repairs(
    remnants: Sequence[Remnant],
    idle: Sequence[str],
    members: Mapping[str, Identity],
    dims: ParallelDims,
    next_number: int,
) -> list[Replica]:
    """Makes whole again what `idle` workers are enough for, those that talk most on one node where
    there are workers for it.

    Args:
        remnants: all whose replica is not being built.
        idle: workers without a place, neighbours on the network next to each other.
        members: all these workers, with their nodes.
        dims: of a whole replica.
        next_number: number of the first new formation.
    """
    pool, repaired = list(idle), list[Replica]()
    for remnant in _largest_first(remnants):
        if len(remnant.workers) + len(pool) < dims.workers:
            break
        workers = _fill(remnant.workers, pool, members, dims)
        taken = set(workers)
        pool = [worker for worker in pool if worker not in taken]
        number = next_number + len(repaired)
        repaired.append(Replica(index=remnant.index, formed=number, workers=workers))
    return repaired


def _fill(
    kept: Mapping[int, str],
    pool: Iterable[str],
    members: Mapping[str, Identity],
    dims: ParallelDims,
) -> tuple[str, ...]:
    """A replica's workers by rank: those that are `kept`, and some of `pool`, which are enough.

    Whose tensor peers live is first, and gets a worker on their node; then whoever shares samples,
    and then a level of two-level collectives, with those that live. A tensor group that is lost as
    a whole gets its workers from one node.
    """
    workers, free = dict(kept), defaultdict[str, list[str]](list)
    for worker in pool:
        free[members[worker].node].append(worker)
    lost: dict[int, list[int]] = defaultdict(list)  # tensor group -> its ranks without a worker
    for rank in range(dims.workers):
        if rank not in kept:
            lost[rank // dims.tensor].append(rank)

    def take(ranks: list[int], node: str) -> None:
        while ranks and free[node]:
            workers[ranks.pop(0)] = free[node].pop(0)

    def near(rank: int, circle: Callable[[int], int]) -> set[str]:
        mates = (worker for other, worker in workers.items() if circle(other) == circle(rank))
        return {members[worker].node for worker in mates}

    circles: tuple[Callable[[int], int], ...] = (
        lambda rank: rank // dims.tensor,
        lambda rank: rank // dims.unit,
        lambda rank: rank // dims.unit % dims.nodes,
    )
    for number, circle in enumerate(circles):
        for ranks in (ranks for ranks in lost.values() if ranks):
            mates = near(ranks[0], circle)
            for node in free:
                if node in mates and (number == 0 or len(free[node]) >= len(ranks)):
                    take(ranks, node)
    for ranks in lost.values():
        while ranks:
            theirs = {members[worker].node for worker in workers.values()}
            take(ranks, max(free, key=lambda n: (min(len(free[n]), len(ranks)), n in theirs)))
    return tuple(workers[rank] for rank in range(dims.workers))


def _largest_first(remnants: Sequence[Remnant]) -> list[Remnant]:
    return sorted(remnants, key=lambda remnant: (-len(remnant.workers), remnant.formed))
