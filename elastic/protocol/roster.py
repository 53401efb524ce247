"""Rosters: which worker holds which slot. Pure.

A replica is formed (its workers get slots, make a process group and build the model) before it
enters a roster. A roster changes by losing replicas that are no longer whole and by gaining formed
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from trainer.replication.lanes import deal_lanes


def replica_prefix(formed: int) -> str:
    """Under which the workers of a replica meet and make their groups."""
    return f"replica/{formed}"


def cross_prefix(generation: int, rank: int) -> str:
    """Under which the workers with the state of `rank`, in all replicas, do."""
    return f"cross/{generation}/{rank}"


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Workers that together hold one whole copy of the model."""

    index: int
    """Its number in the layout, 0 to max_replicas - 1; above that, while the one that it is to
    succeed is still there."""
    formed: int
    """Number of its formation; unique in the run."""
    workers: tuple[str, ...]
    """By rank: shard major, tensor minor."""


@dataclass(frozen=True, kw_only=True)
class Remnant:
    """What is left of a replica that has lost workers: the others, who keep their state."""

    index: int
    """As `Replica.index`."""
    formed: int
    """As `Replica.formed`."""
    workers: Mapping[int, str]
    """By rank."""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The assignment worker -> slot of one generation."""

    generation: int
    """It only grows."""
    replicas: tuple[Replica, ...]
    """In order of position: the rank across replicas."""
    lanes: Mapping[int, tuple[int, ...]]
    """Replica index -> its lanes."""
    remnants: tuple[Remnant, ...] = ()
    """Of others, whose workers follow: without lanes, and in no whole replica."""

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers with a slot."""
        return tuple(worker for replica in self.replicas for worker in replica.workers)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The workers of each replica, and of what is left of others."""
        left = [tuple(remnant.workers.values()) for remnant in self.remnants]
        return [replica.workers for replica in self.replicas] + left

    @property
    def uneven(self) -> bool:
        """Whether a replica has two lanes more than another: dealt anew, they would differ by one
        at most."""
        counts = [len(lanes) for lanes in self.lanes.values()]
        return max(counts, default=0) - min(counts, default=0) > 1

    @cached_property
    def followers(self) -> Mapping[str, Remnant]:
        """All workers of remnants, with theirs."""
        return {worker: each for each in self.remnants for worker in each.workers.values()}

    def followers_of(self, rank: int) -> list[tuple[Remnant, str]]:
        """Those with the state of `rank`, in order of position."""
        return [(each, each.workers[rank]) for each in self.remnants if rank in each.workers]

    def column(self, rank: int) -> list[str]:
        """The workers with the state of `rank`, by position: those of one cross group."""
        followers = (worker for _, worker in self.followers_of(rank))
        return [*(replica.workers[rank] for replica in self.replicas), *followers]

    @property
    def met(self) -> dict[str, tuple[str, ...]]:
        """The prefixes of all groups -> who has met there."""
        own = {replica_prefix(replica.formed): replica.workers for replica in self.replicas}
        ranks = range(len(self.replicas[0].workers) if self.replicas else 0)
        across = {cross_prefix(self.generation, rank): tuple(self.column(rank)) for rank in ranks}
        return own | across

    def replica_of(self, worker: str) -> Replica | None:
        """The replica that `worker` is in."""
        return next((r for r in self.replicas if worker in r.workers), None)


class Heal(NamedTuple):
    """A replica that lacks state."""

    position: int
    """Its position."""
    source: int
    """Position of the replica that it gets the state from."""
    ranks: tuple[int, ...]
    """Those of its workers that lack it."""


def most_replicas(max_replicas: int) -> int:
    """Most replicas in a roster: each may have its successor beside it before it leaves."""
    return 2 * max_replicas


def find_room(*, replicas: int, draining: int, max_replicas: int) -> int:
    """How many may form beside so many `replicas`. Other arguments: see `plan_formations`."""
    return min(most_replicas(max_replicas), max_replicas + draining) - replicas


def plan_formations(
    *,
    pool: Sequence[str],
    taken: Set[int],
    draining: int,
    max_replicas: int,
    workers_per_replica: int,
    next_number: int,
) -> tuple[Replica, ...]:
    """Forms as many replicas as there is room and workers for.

    Args:
        pool: workers without a slot, neighbours on the network next to each other.
        taken: indices of the replicas that exist or are forming.
        draining: how many of them will leave: their successors form beside them.
        max_replicas: most replicas of the run.
        workers_per_replica: workers in one.
        next_number: number of the first new formation.
    """
    free = [index for index in range(most_replicas(max_replicas)) if index not in taken]
    room = find_room(replicas=len(taken), draining=draining, max_replicas=max_replicas)
    count = max(0, min(room, len(pool) // workers_per_replica))
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
    remnants: Sequence[Remnant] = (),
    total_lanes: int,
    before: Roster | None,
) -> Roster:
    """The roster of `generation`: staying replicas, then joining ones, each in order of index.

    Where replicas stay, the joining ones are newcomers: they have no state yet, and get no lanes.

    Args:
        generation: its number.
        staying: replicas that have state.
        joining: formed replicas without state, or with only a part of it, that enter.
        remnants: what follows of others.
        total_lanes: lanes of the run.
        before: the roster whose step was interrupted, if one was: replicas keep the lanes that they
            have computed.
    """
    replicas = (*_by_index(staying), *_by_index(joining))
    at_work = tuple(replica.index for replica in _by_index(staying or joining))
    kept = None
    if before is not None:
        held = {r.formed: before.lanes.get(r.index, ()) for r in before.replicas}
        kept = {replica.index: held.get(replica.formed, ()) for replica in staying}
    lanes = deal_lanes(total_lanes, at_work, kept)
    lanes.update({replica.index: () for replica in joining if staying})
    return Roster(generation=generation, replicas=replicas, lanes=lanes, remnants=tuple(remnants))


def number_anew(replicas: Sequence[Replica], others: Set[int], max_replicas: int) -> list[Replica]:
    """The replicas of the next roster, of which successors have the numbers of those that left.

    Args:
        replicas: as they are numbered so far.
        others: indices of replicas that form and are not among them.
        max_replicas: most replicas of the run.
    """
    taken = {replica.index for replica in replicas} | others
    free = iter([index for index in range(max_replicas) if index not in taken])
    return [
        replica
        if replica.index < max_replicas
        else replace(replica, index=next(free, replica.index))
        for replica in replicas
    ]


def find_renumbered(before: Iterable[Replica], now: Iterable[Replica]) -> dict[int, int]:
    """Old index -> new index of the replicas of `now` that had another one in `before`."""
    numbers = {replica.formed: replica.index for replica in before}
    return {
        numbers[replica.formed]: replica.index
        for replica in now
        if numbers.get(replica.formed, replica.index) != replica.index
    }


def _by_index(replicas: Sequence[Replica]) -> list[Replica]:
    return sorted(replicas, key=lambda replica: replica.index)


def plan_heals(roster: Roster, lacking: Mapping[int, Set[str]], turn: int = 0) -> tuple[Heal, ...]:
    """Who gets the state from whom: the sources take turns.

    Args:
        roster: the new one.
        lacking: formation of each replica without state -> those of its workers that lack it.
        turn: how often a heal has failed: the sources move on by so many.
    """
    places = list(enumerate(roster.replicas))
    sources = [p for p, replica in places if replica.formed not in lacking]
    targets = [(p, replica) for p, replica in places if replica.formed in lacking]
    if not sources:
        return ()
    return tuple(
        Heal(
            position=position,
            source=sources[(turn + i) % len(sources)],
            ranks=tuple(
                rank for rank, w in enumerate(replica.workers) if w in lacking[replica.formed]
            ),
        )
        for i, (position, replica) in enumerate(targets)
    )
