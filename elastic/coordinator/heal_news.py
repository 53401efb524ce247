"""What newcomers tell the coordinator of their heals."""

from __future__ import annotations

import time

from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import HEAL

_MOST_FAILED_HEALS = 3
"""Heals of one replica that fail with nobody lost, before its worker is ended: another process may
get the state, though what is bad may be at the source as well."""


class HealNews:
    """Takes in how heals end: with the state there, or failed.

    Args:
        membership: told of who has the state, and who did not get it.
        dispatcher: carries out what follows.
        workers: loses a worker that never gets it.
        records: where it is written down.
    """

    def __init__(
        self, membership: Membership, dispatcher: Dispatcher, workers: Workers, records: RunLog
    ) -> None:
        self._membership, self._dispatcher = membership, dispatcher
        self._workers, self._records = workers, records
        self.received: dict[str, tuple[int, float, int]] = {}
        """Newcomer's worker -> bytes, seconds and steps of its heal, until its replica is whole; of
        one that was lost, until the next one tells."""

    async def caught_up(
        self, worker: str, generation: int, size: int, seconds: float, steps: int
    ) -> None:
        """A newcomer's worker has received `size` bytes of state, in `seconds`, and made up for
        `steps` steps. Of an earlier roster's heal, told once more after a coordinator was lost,
        nothing follows: its reports say what it has."""
        if generation != self._membership.roster.generation:
            return
        for lost in self.received.keys() - self._membership.members.keys():
            del self.received[lost]
        self.received[worker] = (size, seconds, steps)
        replica = self._membership.caught_up(worker)
        if replica is None:
            return
        source = self._membership.heals.source_of(replica.formed)
        if source is None:
            return
        # Some may have told a coordinator that was lost since.
        found = [self.received.pop(w) for w in replica.workers if w in self.received]
        sizes, times, behind = zip(*found, strict=True)
        self._records.note(
            events.ReplicaHealed(
                time=time.time(),
                generation=self._membership.progress.generation,
                replica=replica.index,
                source=source,
                bytes=sum(sizes),
                seconds=max(times),
                catch_up_steps=max(behind),
            )
        )
        await self._dispatcher.advance()

    async def failed(self, worker: str, generation: int, reason: str) -> None:
        """A newcomer's worker did not get the state: another source, or, in the end, another
        newcomer. Of an earlier roster's heal nothing follows, nor of what is said once more."""
        membership = self._membership
        if generation != membership.roster.generation:
            return
        slot, formed = membership.slot_name(worker), membership.places.formation_of(worker)
        source = None if formed is None else membership.heals.source_of(formed)
        failures = membership.heals.failed(worker)
        if slot is None or source is None or failures == 0:
            return
        self._records.note(
            events.HealFailed(time=time.time(), slot=slot, source=source, reason=reason)
        )
        if failures >= _MOST_FAILED_HEALS:
            await self._workers.kill(worker, HEAL, f"{failures} heals failed: {reason}")
        await self._dispatcher.advance()
