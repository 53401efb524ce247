"""Rosters: which worker holds which slot. Pure.

A replica is formed (its workers get slots, make a process group and build the model) before it
enters a roster. A roster changes by losing replicas that are no longer whole and by gaining formed
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from trainer.lanes import deal_lanes


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Workers that together hold one whole copy of the model."""

    index: int
    """Its number in the layout, 0 to max_replicas - 1."""
    formed: int
    """Number of its formation; unique in the run."""
    workers: tuple[str, ...]
    """By rank: shard major, tensor minor."""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The assignment worker -> slot of one generation."""

    generation: int
    """It only grows."""
    replicas: tuple[Replica, ...]
    """In order of position: the rank across replicas."""
    lanes: Mapping[int, tuple[int, ...]]
    """Replica index -> its lanes."""

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers with a slot."""
        return tuple(worker for replica in self.replicas for worker in replica.workers)

    def replica_of(self, worker: str) -> Replica | None:
        """The replica that `worker` is in."""
        return next((r for r in self.replicas if worker in r.workers), None)


def plan_formations(
    *,
    pool: Sequence[str],
    taken: Set[int],
    max_replicas: int,
    workers_per_replica: int,
    next_number: int,
) -> tuple[Replica, ...]:
    """Forms as many replicas as there is room and workers for.

    Args:
        pool: workers without a slot, neighbours on the network next to each other.
        taken: indices of the replicas that exist or are forming.
        max_replicas: most replicas of the run.
        workers_per_replica: workers in one.
        next_number: number of the first new formation.
    """
    free = [index for index in range(max_replicas) if index not in taken]
    count = min(len(free), len(pool) // workers_per_replica)
    return tuple(
        Replica(
            index=free[i],
            formed=next_number + i,
            workers=tuple(pool[i * workers_per_replica : (i + 1) * workers_per_replica]),
        )
        for i in range(count)
    )


def next_roster(
    *,
    generation: int,
    staying: Sequence[Replica],
    joining: Sequence[Replica],
    total_lanes: int,
    lanes_before: Mapping[int, tuple[int, ...]] | None,
) -> Roster:
    """The roster of `generation`: staying replicas, then joining ones, each in order of index.

    Where replicas stay, the joining ones are newcomers: they have no state yet, and get no lanes.

    Args:
        generation: its number.
        staying: replicas that have state.
        joining: formed replicas without state that enter.
        total_lanes: lanes of the run.
        lanes_before: given where a step was interrupted: replicas keep the lanes they have
            computed.
    """
    replicas = (*_by_index(staying), *_by_index(joining))
    at_work = tuple(replica.index for replica in _by_index(staying or joining))
    kept = None
    if lanes_before is not None:
        kept = {replica.index: lanes_before.get(replica.index, ()) for replica in staying}
    lanes = deal_lanes(total_lanes, at_work, kept)
    lanes.update({replica.index: () for replica in joining if staying})
    return Roster(generation=generation, replicas=replicas, lanes=lanes)


def _by_index(replicas: Sequence[Replica]) -> list[Replica]:
    return sorted(replicas, key=lambda replica: replica.index)


def plan_heals(roster: Roster, joining: Set[int], turn: int = 0) -> tuple[tuple[int, int], ...]:
    """(position without state, position it heals from): the sources take turns.

    Args:
        roster: the new one.
        joining: indices of the replicas without state.
        turn: how often a heal has failed: the sources move on by so many.
    """
    sources = [p for p, replica in enumerate(roster.replicas) if replica.index not in joining]
    targets = [p for p, replica in enumerate(roster.replicas) if replica.index in joining]
    if not sources:
        return ()
    return tuple((target, sources[(turn + i) % len(sources)]) for i, target in enumerate(targets))
