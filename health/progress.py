"""From the places of all workers in their step to a verdict: who keeps the others? Pure.

A worker that loops in its own code beats on, and so do the peers that wait for it. What tells is
that nothing moves: no step is committed, no worker enters another phase, none begins another
collective. Of those who stand still, the ones at fault do not wait for other replicas, and of a
replica's workers they have begun the fewest collectives: the others wait in one that these have yet
to enter.

How long is too long follows from the run itself: its median step, and the longest that this worker
has been in one phase of a step, or one batch of an evaluation, and went on. Where more than half of
the replicas seem to keep the rest, the cause is one that they share, such as a storage that does
not answer: they get far longer. When that ends, those who come back later than most get as long as
if they had come into their phase then.

Where each waits for others, in a collective that does not end, it may have failed on one side, or
be slow. With each time that all were called for it, and no connection failed, they get twice as
long: so what is slow comes to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal, NamedTuple

MEDIANS = 3.0
"""Median steps that a phase of a step may take."""
LONGEST = 2.0
"""Times the longest that a worker has taken before."""
SOON = 0.6
"""Share of the bound at which one is suspected: evidence is taken then, and again at the bound."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker is in its step."""

    mark: int
    """Number of the phase that it is in, among all it has entered."""
    phase: str
    """That phase, with its step, in words."""
    in_phase_s: float
    """How long it has been in it, without the time in which it could run and had no core."""
    bound: Literal["pace", "shared"] | None
    """How long it may take. By the run's pace: a phase of a step, or a batch of an evaluation. As
    long as where the cause is shared: the same in the first steps and the first evaluated batches
    of a process, and saves. None: it has no bound here."""
    waits: bool
    """It is one in which it waits for other replicas, or for what follows."""
    collectives: int
    """Collectives that it has begun with the others of its replica."""
    longest_s: float
    """The longest of late that it was in such a phase in which it waits for nobody, and went on: of
    steps where it is in one, of evaluations where it evaluates."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A worker that keeps the others."""

    worker: str
    mark: int
    """`Place.mark`."""
    evidence: str
    """What shows it, in words."""


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """What a look at all places has shown."""

    suspects: tuple[Suspect, ...] = ()
    """Those who keep the others."""
    standing: tuple[str, ...] = ()
    """The same, but by what is long for each replica, whatever most of them do: some of these may
    wait for what never comes over a bad connection."""
    all_wait: bool = False
    """Nobody does: each waits for others, in a collective that does not end."""
    shared: bool = False
    """Most replicas stand still: the cause is one that they share."""


def bound_s(least_s: float, steps_s: Sequence[float], longest_s: float = 0.0) -> float:
    """How long a phase of a step, or a batch of an evaluation, may take.

    Args:
        least_s: whatever the steps take.
        steps_s: durations of the latest steps; some.
        longest_s: `Place.longest_s`.
    """
    return max(least_s, MEDIANS * median(steps_s), LONGEST * longest_s)


def find_standstill(
    replicas: Sequence[Mapping[str, Place | None]],
    least_s: float,
    steps_s: Sequence[float],
    *,
    share: float = 1.0,
    shared_s: float,
    single_s: float = inf,
    patience: float = 1.0,
) -> Standstill:
    """Who keeps the others, where nothing moves.

    Args:
        replicas: worker -> its place, for each replica of the roster; None where nobody can tell:
            nobody of that replica is accused, and the others, who may wait for it, have longer.
        least_s: see `bound_s`.
        steps_s: see `bound_s`.
        share: of the bound that counts.
        shared_s: how long a phase may take where most are in one that takes long.
        single_s: for how long no more than a minority has stood still.
        patience: times the bound that all may wait for each other, up to `shared_s`.
    """
    known = [_known(replica) for replica in replicas]
    all_known = all(known)
    limits = _Limits(least_s, steps_s, shared_s, share)
    found = [_suspects(replica, limits) for replica in known]
    standing = tuple(suspect.worker for of_replica in found for suspect in of_replica)
    shared = _most(replicas, found)
    settles = any(_settles(place) for replica in known for place in replica.values())
    if shared or settles or not all_known:
        limits = limits._replace(least_s=shared_s)
    else:
        limits = limits._replace(single_s=single_s)
    suspects = tuple(suspect for replica in known for suspect in _suspects(replica, limits))
    usual_s = bound_s(least_s, steps_s)
    still = share * min(patience * usual_s, max(usual_s, shared_s))
    return Standstill(
        suspects=suspects,
        standing=standing,
        all_wait=all_known
        and all(
            place.bound == "pace"
            and (place.waits or _waits_for_mate(place, replica))
            and place.in_phase_s > still
            for replica in known
            for place in replica.values()
        ),
        shared=shared,
    )


class _Limits(NamedTuple):
    """Of `find_standstill`."""

    least_s: float
    steps_s: Sequence[float]
    shared_s: float
    share: float
    single_s: float = inf

    def of(self, place: Place) -> float:
        """How long a worker may be there, waiting for nobody."""
        if place.bound is None:
            return inf
        least_s = self.least_s if place.bound == "pace" else self.shared_s
        return self.share * bound_s(least_s, self.steps_s, place.longest_s)

    def are_kept(self, place: Place) -> bool:
        """Whether it is there for no longer."""
        return min(place.in_phase_s, self.single_s) <= self.of(place)


def _known(replica: Mapping[str, Place | None]) -> dict[str, Place]:
    """All of a replica; none where one of them may be anywhere."""
    known = {worker: place for worker, place in replica.items() if place is not None}
    return known if len(known) == len(replica) else {}


def _most(
    replicas: Sequence[Mapping[str, Place | None]], found: Sequence[Sequence[Suspect]]
) -> bool:
    """Whether nobody, or a minority, is kept by the suspects."""
    if len(replicas) == 1:
        return len(found[0]) == len(replicas[0])
    return 2 * sum(map(bool, found)) > len(replicas)


def _settles(place: Place) -> bool:
    """Whether a worker is at what comes before its steps, or in the first of them. Others may be at
    their part of it meanwhile: the source of its state copies that."""
    return place.bound != "pace" and not place.waits


def _waits_for_mate(place: Place, places: Mapping[str, Place]) -> bool:
    """Whether a worker is in a collective that one of its replica has yet to enter, which waits for
    other replicas."""
    return any(mate.waits and mate.collectives < place.collectives for mate in places.values())


def _suspects(places: Mapping[str, Place], limits: _Limits) -> list[Suspect]:
    """Of one replica."""
    busy = {
        worker: place
        for worker, place in places.items()
        if not place.waits and not _waits_for_mate(place, places)
    }
    fewest = min((place.collectives for place in busy.values()), default=0)
    most = max((place.collectives for place in busy.values()), default=0)
    found = []
    for worker, place in busy.items():
        if limits.are_kept(place):
            return []  # it has just moved, and so will the others
        if place.collectives == fewest:
            evidence = (
                f"for {place.in_phase_s:.1f} s in {place.phase}, where {limits.of(place):.1f} s "
                "are long"
            )
            if most > fewest:
                evidence += f"; it has begun {fewest} collectives, and its peers wait in the next"
            found.append(Suspect(worker=worker, mark=place.mark, evidence=evidence))
    return found
