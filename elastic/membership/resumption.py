"""From what the workers know to what a new coordinator must know. Pure.

The workers of a run hold everything that its coordinator decided: each knows its replica, its rank
in it, and the roster's generation. So a coordinator that was lost is started anew, asks them, and
goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.protocol.messages import Standing
from elastic.protocol.roster import Heal, Replica, Roster


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A run as its workers know it."""

    roster: Roster
    """The newest roster that one of them is in, with replicas of older ones where that is not
    whole; nobody has the names of those who are gone."""
    standing: tuple[Replica, ...]
    """Replicas of it that are whole."""
    forming: tuple[Replica, ...]
    """Whole formations that were in no roster yet, all of whose workers have built their part.
    Successors of replicas that will leave are none of them: they may have been given up since."""
    broken: tuple[Replica, ...]
    """What is left of others, which nobody waits for. Of those that were being built the process
    group was to meet at the store that is lost: one that has no connection to it yet goes on trying
    until it is called."""
    kept: int
    """The one of `forming` that goes on with what its workers hold; 0: none."""
    doubtful: frozenset[int]
    """Those of `standing` that were in an older roster last: they may have left before it ended."""
    torn: frozenset[str]
    """Workers of formations of which only some got the last roster: these train, and wait for the
    others, who wait for an answer."""
    behind: dict[str, int]
    """Worker without state so far -> its formation."""
    heals: tuple[Heal, ...]
    """Who lacks state, and gets it from whom; none where it is not `consistent`."""
    consistent: bool
    """All of the roster is there and at work: no regroup was under way."""


def plan_resumption(
    standings: Sequence[Standing], *, workers_per_replica: int, max_replicas: int
) -> Resumption:
    """Puts together what the living workers know.

    Args:
        standings: one of each.
        workers_per_replica: workers in a whole replica.
        max_replicas: most replicas of the run.
    """
    formations = _formations(standings, workers_per_replica)
    generation = max((f.generation for f in formations), default=0)
    # Replicas of the newest roster keep their index, whoever was formed later: they may have got it
    # from a younger one that left.
    formations.sort(key=lambda f: (f.whole and f.generation == generation, f.formed))
    # Those of extra indices that form are given up below. One of the roster before, with the same
    # extra index, may have got another one since, and not have heard of it.
    last = {f.index: f for f in formations if f.generation or f.index < max_replicas}
    # One that is whole, and whose index another one has, had left, or was given up.
    left = [f for f in formations if f.whole and last.get(f.index, f) is not f]
    placed = sorted(
        (f for f in formations if f.generation and f not in left), key=lambda f: f.first.position
    )
    newest = [f for f in placed if f.generation == generation]
    consistent = bool(newest) and all(
        f.whole and f.proven and f.first.replicas == len(newest) for f in newest
    )
    if consistent:
        placed = newest  # the others had left before
    standing = [f for f in placed if f.whole]
    forming = [f for f in formations if f not in left and f.forms and f.index < max_replicas]
    taken = {f.formed for f in (*placed, *forming)}
    new = [f for f in newest if f.first.source is not None]
    return Resumption(
        roster=Roster(
            generation=generation,
            replicas=tuple(f.replica for f in placed),
            lanes={f.index: f.first.lanes for f in placed} if consistent else {},
        ),
        standing=tuple(f.replica for f in standing),
        forming=tuple(f.replica for f in forming),
        broken=tuple(f.replica for f in formations if f.formed not in taken),
        kept=max((f.formed for f in forming if f.first.kept), default=0),
        doubtful=frozenset(f.formed for f in standing if f.generation < generation),
        torn=frozenset(s.identity.worker for f in formations if f.torn for s in f.members),
        behind={s.identity.worker: s.formed for f in new for s in f.members if s.behind},
        heals=tuple(f.heal for f in new if consistent),
        consistent=consistent,
    )


def _formations(standings: Sequence[Standing], size: int) -> list[_Formation]:
    groups: dict[int, list[Standing]] = defaultdict(list)
    for each in standings:
        if each.formed:
            groups[each.formed].append(each)
    return [_Formation(group, size) for group in groups.values()]


class _Formation:
    """The standings of the living workers of one formation."""

    def __init__(self, members: Sequence[Standing], size: int) -> None:
        self.members = members
        self.first = max(members, key=lambda standing: standing.generation)
        self.formed, self.index = self.first.formed, self.first.replica
        self.generation = self.first.generation
        self.proven = all(standing.proven for standing in members)
        self.torn = any(s.generation != self.generation for s in members)
        follows = self.generation > 0 and self.first.position >= self.first.replicas
        self.whole = len(members) == size and not self.torn and not follows
        self.forms = self.whole and not self.generation and all(s.built for s in members)
        names = {standing.rank: standing.identity.worker for standing in members}
        self.replica = Replica(
            index=self.index,
            formed=self.formed,
            workers=tuple(names.get(rank, f"lost rank {rank}") for rank in range(size)),
        )

    @property
    def heal(self) -> Heal:
        """Of those of its workers that still lack state."""
        ranks = tuple(sorted(standing.rank for standing in self.members if standing.behind))
        return Heal(self.first.position, self.first.source or 0, ranks)
