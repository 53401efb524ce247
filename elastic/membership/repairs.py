"""What is left of replicas is made whole again. Pure.

Whoever survives in a replica that has lost a worker keeps its rank and its state, and follows the
others (docs/decisions/031). Another worker takes the rank that is lost. Where too few are idle for
that, the smallest remnant is given up for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastic.protocol.messages import Identity
from elastic.protocol.roster import Remnant, Replica


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
    size: int,
    next_number: int,
) -> list[Replica]:
    """Makes whole again what `idle` workers are enough for, with those on a remnant's own nodes
    first.

    Args:
        remnants: all whose replica is not being built.
        idle: workers without a place, neighbours on the network next to each other.
        members: all these workers, with their nodes.
        size: workers in a whole replica.
        next_number: number of the first new formation.
    """
    pool, repaired = list(idle), list[Replica]()
    for remnant in _largest_first(remnants):
        lacking = size - len(remnant.workers)
        if lacking > len(pool):
            break
        near = {members[worker].node for worker in remnant.workers.values()}
        chosen = sorted(pool, key=lambda worker: members[worker].node not in near)[:lacking]
        pool = [worker for worker in pool if worker not in chosen]
        new = iter(chosen)
        workers = (remnant.workers.get(rank) or next(new) for rank in range(size))
        number = next_number + len(repaired)
        repaired.append(Replica(index=remnant.index, formed=number, workers=tuple(workers)))
    return repaired


def _largest_first(remnants: Sequence[Remnant]) -> list[Remnant]:
    return sorted(remnants, key=lambda remnant: (-len(remnant.workers), remnant.formed))
