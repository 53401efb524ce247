"""Workers that start, and how long the first replicas wait for more of them."""

from __future__ import annotations

import asyncio
import time

from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.messages import Identity


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
        self._start: asyncio.TimerHandle | None = None
        """When the first replicas begin without those that have not come."""

    async def hello(self, identity: Identity) -> None:
        """A worker has started."""
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
            )
        )
        self.put_off_start()
        self._workers.watch(identity)
        self._workers.pass_over(identity.worker)
        if identity.node in self._workers.draining_nodes:
            await self._workers.drain(
                [identity.worker], "its node is draining", None, identity.node
            )

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
        self._membership.formations.wait_no_longer()
        await self._dispatcher.advance()
