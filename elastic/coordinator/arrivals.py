"""Workers that start, and how long the first replicas wait for more of them."""

from __future__ import annotations

import asyncio
import time

from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import HANG
from elastic.protocol.messages import Identity

_TIMES = 3.0
_LEAST_S = 300.0
"""A worker that has started is ended when it has not joined after so many times the patience, and
no less than so long: it imports, and may compile."""


class Arrivals:
    """Takes in workers that have started.

    Args:
        membership: told when the first workers are waited for no longer.
        dispatcher: carries out what follows.
        workers: watches them.
        records: where it is written down.
        patience_s: how long the start waits after the latest arrival.
    """

    def __init__(
        self,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        records: RunLog,
        patience_s: float,
    ) -> None:
        self._membership, self._dispatcher = membership, dispatcher
        self._workers, self._records = workers, records
        self._patience_s = patience_s
        self.hellos = 0
        """Workers that have started so far."""
        self.coming: set[str] = set()
        """Workers that have started and not joined yet, and a while longer those of them that were
        lost."""
        self._start: asyncio.TimerHandle | None = None
        """When the first replicas begin without those that have not come."""

    async def hello(self, identity: Identity, *, joins: bool = True) -> None:
        """A worker has started, and `joins` soon; or it is watched already, and in no record yet.

        Of a hello that comes once more nothing follows, for its answer may be lost, and it may come
        late. Who was written off since, and lives, is told so where it joins.
        """
        repeated = joins and self._workers.started.get(identity.worker) == identity
        if repeated or identity.worker in self._membership.lost:
            return
        self.hellos += 1
        self._records.note(
            events.WorkerJoined(
                time=time.time(),
                worker=identity.worker,
                node=identity.node,
                pid=identity.pid,
                born_ticks=identity.born_ticks,
                device=identity.device,
                logs=list(identity.logs),
                heartbeat_fd=identity.heartbeat_fd,
            )
        )
        self.put_off_start()
        if joins:
            self.await_join(identity.worker)
        self._workers.watch(identity)
        self._workers.pass_over(identity.worker)
        if identity.node in self._workers.draining_nodes:
            await self._workers.drain(
                [identity.worker], "its node is draining", None, identity.node
            )

    def await_join(self, worker: str) -> None:
        """It has started, and joins soon, or is ended."""
        self.coming.add(worker)
        bound_s = max(_TIMES * self._patience_s, _LEAST_S)
        asyncio.get_running_loop().call_later(
            bound_s, lambda: self._dispatcher.spawn(self._end_late(worker, bound_s))
        )

    async def joined(self, worker: str) -> None:
        """A worker joins."""
        self.put_off_start()
        if worker in self.coming:  # not in a regroup, where thousands join at once
            self.coming.discard(worker)
            await self._dispatcher.tell()

    async def until_here(self, node: str) -> None:
        """Waits until all workers that have started on a machine have joined, or are no more."""
        started = self._workers.started

        def here() -> bool:
            return all(started[w].node != node for w in self.coming & started.keys())

        await self._dispatcher.until(here)

    def put_off_start(self) -> None:
        """At the start all workers are waited for, as long as they come: neighbours then get into
        one replica."""
        if self._start is not None:
            self._start.cancel()
        if self._membership.formations.begun == 0:
            self._start = asyncio.get_running_loop().call_later(
                self._patience_s, lambda: self._dispatcher.spawn(self._begin())
            )

    async def _begin(self) -> None:
        if self.coming & self._workers.started.keys():
            self.put_off_start()
            return
        self._membership.formations.wait_no_longer()
        await self._dispatcher.advance()

    async def _end_late(self, worker: str, after_s: float) -> None:
        """Nobody waits for it in a collective, so nobody else would find it."""
        if worker not in self._workers.started:  # it was lost before it joined
            self.coming.discard(worker)
        if worker not in self.coming:
            return
        if self._records.answered_for_s() < self._patience_s:  # it may be its answer that waits
            self.await_join(worker)
        else:
            detail = (
                f"it started {after_s:g} s ago and has not joined: what it imports, its first look "
                f"at the data, or its compilation hangs (health.regroup_timeout_s)"
            )
            await self._workers.kill(worker, HANG, detail)
            self.coming.discard(worker)
