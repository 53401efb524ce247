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


def find_mendable(remnants: Sequence[Remnant], idle: int, size: int) -> list[Remnant]:
    """Those that so many `idle` workers make replicas of `size`, the largest first."""
    found = list[Remnant]()
    for remnant in _largest_first(remnants):
        idle -= size - len(remnant.workers)
        if idle < 0:
            break
        found.append(remnant)
    return found


def merge_remnants(
    remnants: Sequence[Remnant], idle: int, members: Mapping[str, Identity], dims: ParallelDims
) -> tuple[list[Remnant], list[str]]:
    """Gives up as many of `remnants` as must be for one that can be made whole, if that is enough.

    Each of their workers goes to the largest that lacks its rank; rather to one that has its tensor
    peers on the worker's node, but not where fewer were left then, or more workers had to heal.

    Args:
        remnants: all whose replica is not being built.
        idle: workers without a place.
        members: all workers of `remnants`, with their nodes.
        dims: of a whole replica.

    Returns:
        Those that are left, with the workers of the others whose ranks they lacked; and the other
        workers of those others, who are idle now.
    """
    if sum(len(remnant.workers) for remnant in remnants) + idle < dims.workers:
        return _largest_first(remnants), []

    def near(remnant: Remnant, rank: int, worker: str) -> bool:
        first = rank - rank % dims.tensor
        peers = (remnant.workers.get(other) for other in range(first, first + dims.tensor))
        return any(peer and members[peer].node == members[worker].node for peer in peers)

    def count(left: Sequence[Remnant], freed: Sequence[str]) -> tuple[int, int]:
        whole = find_mendable(left, idle + len(freed), dims.workers)
        return len(left), sum(len(remnant.workers) for remnant in whole)

    wanted = _merge(remnants, idle, dims.workers, near)
    by_size = _merge(remnants, idle, dims.workers, lambda *_: False)
    less = any(a < b for a, b in zip(count(*wanted), count(*by_size), strict=True))
    return by_size if less else wanted


def _merge(
    remnants: Sequence[Remnant],
    idle: int,
    size: int,
    prefers: Callable[[Remnant, int, str], bool],
) -> tuple[list[Remnant], list[str]]:
    """As `merge_remnants`, whatever it costs: of those that lack a worker's rank the largest that
    `prefers` it gets it, else the largest."""
    left, freed = _largest_first(remnants), list[str]()
    while len(left) > 1 and not find_mendable(left, idle + len(freed), size):
        for rank, worker in left.pop().workers.items():
            places = [i for i, other in enumerate(left) if rank not in other.workers]
            if places:
                place = max(places, key=lambda i: prefers(left[i], rank, worker))
                other = left[place]
                left[place] = replace(other, workers={**other.workers, rank: worker})
            else:
                freed.append(worker)
        left = _largest_first(left)
    return left, freed


def plan_repairs(
    remnants: Sequence[Remnant],
    idle: Sequence[str],
    members: Mapping[str, Identity],
    dims: ParallelDims,
    next_number: int,
) -> list[Replica]:
    """Makes whole again what `idle` workers are enough for, the largest first, those that talk most
    on one node where there are workers for it.

    Args:
        remnants: all whose replica is not being built.
        idle: workers without a place, neighbours on the network next to each other.
        members: all these workers, with their nodes.
        dims: of a whole replica.
        next_number: number of the first new formation.
    """
    chosen = find_mendable(remnants, len(idle), dims.workers)
    filled = _fill([remnant.workers for remnant in chosen], idle, members, dims)
    return [
        Replica(index=remnant.index, formed=next_number + i, workers=workers)
        for i, (remnant, workers) in enumerate(zip(chosen, filled, strict=True))
    ]


def _fill(
    kept: Iterable[Mapping[int, str]],
    pool: Iterable[str],
    members: Mapping[str, Identity],
    dims: ParallelDims,
) -> list[tuple[str, ...]]:
    """The workers of each replica by rank: those that are `kept` of it, and some of `pool`, which
    are enough.

    In all of them whose tensor peers live is first, and gets a worker on their node. A tensor group
    that is lost as a whole is next, and gets its workers from one node. Of several nodes it takes
    that of those that live of whoever shares samples, and then of a level of two-level collectives.
    So does, at last, whose tensor peers have no free worker on their node.
    """
    replicas, free = [dict(workers) for workers in kept], defaultdict[str, list[str]](list)
    for worker in pool:
        free[members[worker].node].append(worker)
    lost: list[tuple[dict[int, str], list[int]]] = []  # a replica, and a tensor group's lost ranks
    for workers in replicas:
        for first in range(0, dims.workers, dims.tensor):
            ranks = [r for r in range(first, first + dims.tensor) if r not in workers]
            lost.append((workers, ranks))

    def take(workers: dict[int, str], ranks: list[int], node: str) -> None:
        while ranks and free[node]:
            workers[ranks.pop(0)] = free[node].pop(0)

    def near(workers: dict[int, str], rank: int, circle: Callable[[int], int]) -> set[str]:
        mates = (worker for other, worker in workers.items() if circle(other) == circle(rank))
        return {members[worker].node for worker in mates}

    circles: tuple[Callable[[int], int], ...] = (
        lambda rank: rank // dims.tensor,
        lambda rank: rank // dims.unit,
        lambda rank: rank // dims.unit % dims.nodes,
    )

    def take_near(number: int, groups: Sequence[tuple[dict[int, str], list[int]]]) -> None:
        for workers, ranks in groups:
            if not ranks:
                continue
            mates = near(workers, ranks[0], circles[number])
            for node in free:
                if node in mates and (number == 0 or len(free[node]) >= len(ranks)):
                    take(workers, ranks, node)

    take_near(0, lost)
    # Whose tensor peers are far anyway leaves room on one node for those that are lost together.
    together = [group for group in lost if len(group[1]) == dims.tensor]
    apart = [group for group in lost if len(group[1]) < dims.tensor]
    for groups in (together, apart):
        take_near(1, groups)
        take_near(2, groups)
        for workers, ranks in groups:
            while ranks:
                theirs = {members[worker].node for worker in workers.values()}
                node = max(free, key=lambda n: (min(len(free[n]), len(ranks)), n in theirs))
                take(workers, ranks, node)
    return [tuple(workers[rank] for rank in range(dims.workers)) for workers in replicas]


def _largest_first(remnants: Sequence[Remnant]) -> list[Remnant]:
    return sorted(remnants, key=lambda remnant: (-len(remnant.workers), remnant.formed))
