"""Which newcomers get the state from whom, and which of them have it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastic.protocol.roster import Replica, Roster, plan_heals


class Heals:
    """The heals of one roster: who gets the state from whom, and who has it by now."""

    def __init__(self) -> None:
        self.pairs: tuple[tuple[int, int], ...] = ()
        """(position without state when the roster began, position it heals from)."""
        self.behind: dict[str, int] = {}
        """Newcomer's worker without state yet -> its formation."""
        self.newcomers: set[int] = set()
        """Formations that have not all of their state yet, as far as is known."""
        self.again = False
        """One has failed: another source is to be tried."""
        self._failures: dict[int, int] = {}

    def resume(
        self,
        pairs: tuple[tuple[int, int], ...],
        behind: Mapping[str, int],
        doubtful: Iterable[int],
    ) -> None:
        """Goes on with the heals of a run whose coordinator was lost; the state of the formations
        in `doubtful` may be an old one."""
        self.pairs, self.behind = pairs, dict(behind)
        self.newcomers = {*behind.values(), *doubtful}

    def begin(self, roster: Roster, newcomers: Sequence[Replica]) -> None:
        """A roster stands: those without state get it from the others; a source that failed before
        is passed by."""
        turn = sum(self._failures.get(replica.formed, 0) for replica in newcomers)
        self.pairs = plan_heals(roster, {replica.index for replica in newcomers}, turn)
        self.behind = {worker: r.formed for r in newcomers for worker in r.workers}
        self.newcomers = {replica.formed for replica in newcomers}
        self.again = False

    def received(self, worker: str) -> bool:
        """A newcomer's worker has the state. Returns whether it was the last of its replica."""
        formed = self.behind.pop(worker, None)
        if formed is None or formed in self.behind.values():
            return False
        self.newcomers.discard(formed)
        return True

    def failed(self, worker: str) -> int:
        """A newcomer's worker did not get the state. Returns how often that has happened to its
        replica."""
        formed = self.behind.get(worker)
        if formed is None:
            return 0
        if not self.again:
            self._failures[formed] = self._failures.get(formed, 0) + 1
        self.again = True
        return self._failures.get(formed, 0)

    def source_of(self, position: int) -> int | None:
        """Position that the newcomer at `position` heals from; None for one that had state."""
        return dict(self.pairs).get(position)
