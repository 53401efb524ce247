"""Which newcomers get the state from whom, and which of them have it. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence, Set

from elastic.protocol.roster import Heal, Replica, Roster, plan_heals


class Heals:
    """The heals of one roster: who gets the state from whom, and who has it by now.

    While everybody is at work this is the one place that knows who has state; those who wait say it
    in their reports.
    """

    def __init__(self) -> None:
        self.plan: tuple[Heal, ...] = ()
        """Who lacked state when the roster began, and gets it from whom."""
        self.again = False
        """One has failed: another source is to be tried."""
        self._behind: dict[int, set[str]] = {}
        """Formation -> those of its workers that are not known to have the state."""
        self._formations: dict[str, int] = {}
        """Newcomer's worker -> its formation."""
        self._sources: dict[int, int] = {}
        """Formation without state when the roster began -> number of the replica it heals from."""
        self._failures: dict[int, int] = {}
        self._told: set[str] = set()
        """Those that have told of the failure of their heal in this roster."""

    def begin(self, roster: Roster, newcomers: Sequence[Replica], holders: Container[str]) -> None:
        """A roster stands: those of the `newcomers`' workers that are no `holders` of the state get
        it from the others; a source that failed before is passed by."""
        turn = sum(self._failures.get(replica.formed, 0) for replica in newcomers)
        lacking = {r.formed: {w for w in r.workers if w not in holders} for r in newcomers}
        self._set(plan_heals(roster, lacking, turn), roster, lacking)

    def resume(
        self,
        plan: tuple[Heal, ...],
        roster: Roster,
        behind: Mapping[str, int],
        doubtful: Iterable[int],
    ) -> None:
        """Goes on with the heals of a run whose coordinator was lost.

        Args:
            plan: as `plan`.
            roster: whose positions it names.
            behind: worker without state so far -> its formation.
            doubtful: formations of `roster` whose state may be an old one.
        """
        lacking = {r.formed: set(r.workers) for r in roster.replicas if r.formed in set(doubtful)}
        for worker, formed in behind.items():
            lacking.setdefault(formed, set()).add(worker)
        self._set(plan, roster, lacking)

    def _set(self, plan: tuple[Heal, ...], roster: Roster, behind: dict[int, set[str]]) -> None:
        self.plan, self.again, self._behind = plan, False, behind
        self._told.clear()
        self._formations = {w: formed for formed, workers in behind.items() for w in workers}
        replicas = roster.replicas
        self._sources = {replicas[h.position].formed: replicas[h.source].index for h in plan}

    # -- facts -------------------------------------------------------------------------------------

    def received(self, worker: str) -> bool:
        """A newcomer's worker has the state. Returns whether it was the last of its replica."""
        formed = self._formations.pop(worker, None)
        if formed is None:
            return False
        self._behind[formed].discard(worker)
        if self._behind[formed]:
            return False
        del self._behind[formed]
        return True

    def failed(self, worker: str) -> int:
        """A newcomer's worker did not get the state. Returns how often that has happened to its
        replica; 0 where the worker has said so before, or has nothing to get."""
        formed = self._formations.get(worker)
        if formed is None or worker in self._told:
            return 0
        self._told.add(worker)
        if not self.again:
            self._failures[formed] = self._failures.get(formed, 0) + 1
        self.again = True
        return self._failures.get(formed, 0)

    # -- questions ---------------------------------------------------------------------------------

    @property
    def behind(self) -> Set[int]:
        """Formations of which not all workers are known to have the state."""
        return self._behind.keys()

    def lacks(self, worker: str) -> bool:
        """Whether `worker` is not known to have the state."""
        return worker in self._formations

    def source_of(self, formed: int) -> int | None:
        """Number of the replica that formation `formed` heals from; None for one that had state."""
        return self._sources.get(formed)
