"""A coordinator that was started anew takes up the run: it asks the workers where they stand.

a call comes, or a worker says where it stands ──► those that the records name are watched
     ──► all have spoken, or died, or `health.freeze_timeout_s` is over; so with the nodes, asked
         which snapshots their memory holds ──► membership goes on
     ──► `ready`: calls that waited go on, the silent are written off

Records may end before the coordinator did, where its machine was lost with a cache of them. Nothing
that anybody was told is missing (`RunLog.durable`). But who speaks up is one of the run, whether
the records name it or not, unless they say that it was lost. A coordinator whose own link was down
has lost all nodes but its own: those that speak up are taken back, where no roster stood since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from elastic.coordinator.arrivals import Arrivals
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.replay import Replay
from elastic.coordinator.snapshots import Snapshots
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol.causes import CRASH
from elastic.protocol.messages import Death, Identity, Standing

_SEAT_UNKNOWN = -1


class Failover:
    """Hears the workers and the nodes, then lets membership go on from what they say.

    Args:
        replayed: what the records say.
        membership: goes on from what the workers say.
        dispatcher: `ready` is set at the end.
        workers: watches the workers, and loses the silent.
        arrivals: takes in those that are in no record.
        snapshots: looks for what the nodes hold; None where the run takes none.
        silent_s: how long to wait for workers and nodes: one whose heartbeat stands still for as
            long is frozen.
        take_back: told of the nodes of workers that were written off and live.
        on_ready: called once the run is known.
    """

    def __init__(
        self,
        replayed: Replay,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        arrivals: Arrivals,
        snapshots: Snapshots | None,
        silent_s: float,
        take_back: Callable[[Sequence[str]], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._take_back = take_back
        self._silent_s, self._on_ready = silent_s, on_ready
        self._replayed, self._membership, self._dispatcher = replayed, membership, dispatcher
        self._workers, self._arrivals, self._snapshots = workers, arrivals, snapshots
        self._standings: dict[str, Standing] = {}
        self._dead: set[str] = set()
        self._begun = False

    def begin(self) -> None:
        """Begins, at the first call that shows that the run lives."""
        if not self._begun:
            self._begun = True
            self._dispatcher.spawn(self._run())

    def awaits(self, worker: str) -> bool:
        """Whether `worker` is one that lived, and is to say where it stands."""
        return worker in self._replayed.workers

    async def hear(self, standing: Standing) -> None:
        """A worker says where it stands."""
        self._standings[standing.identity.worker] = standing
        self._workers.watch(standing.identity)
        self.begin()
        await self._dispatcher.tell()

    async def count_dead(self, deaths: list[Death]) -> None:
        """These need not be waited for."""
        self._dead.update(death.worker for death in deaths)
        await self._dispatcher.tell()

    async def _run(self) -> None:
        """Waits for the workers that lived when the last coordinator was lost; writes off those
        that have died, or do not speak up. Nothing is decided before the nodes have said what they
        hold: the run might go back further than it must."""
        expected = self._replayed.workers
        for worker, joined in expected.items():
            if worker not in self._standings:
                self._workers.watch(
                    Identity(
                        worker=worker,
                        rank=_SEAT_UNKNOWN,
                        node=joined.node,
                        pid=joined.pid,
                        born_ticks=joined.born_ticks,
                    )
                )
        await asyncio.gather(
            self._dispatcher.until(
                lambda: expected.keys() <= self._standings.keys() | self._dead, self._silent_s
            ),
            self._look_for_snapshots(),
        )
        living = self._standings.keys() - self._replayed.lost
        self._go_on(living)
        for worker in living:
            standing = self._standings[worker]
            if standing.formed == standing.generation == 0:  # it has had no place
                self._arrivals.await_join(worker)
        self._take_back([self._standings[w].identity.node for w in living & self._replayed.unheard])
        self._dispatcher.ready.set()
        self._on_ready()
        unheard = self._replayed.unheard
        for worker in sorted(living - (expected.keys() - unheard)):
            await self._arrivals.hello(self._standings[worker].identity, joins=False)
        silent = (
            f"said nothing for {self._silent_s:g} s after the coordinator was started anew "
            f"(health.freeze_timeout_s)"
        )
        for worker in expected.keys() - living - self._dead:
            if worker in unheard:
                self._workers.expel(worker)  # its loss is in the records
            else:
                await self._workers.kill(worker, CRASH, silent)
        await self._dispatcher.advance()

    async def _look_for_snapshots(self) -> None:
        if self._snapshots is not None:
            await self._snapshots.look_again(self._silent_s)

    def _go_on(self, living: set[str]) -> None:
        replayed = self._replayed
        self._membership.resume(
            [self._standings[worker] for worker in sorted(living)],
            generation=replayed.generation,
            restored=replayed.restored,
            formations=replayed.formations,
            recorded=replayed.recorded,
            began=replayed.began,
            winding_down=replayed.winding_down,
            until=replayed.until,
        )
        if replayed.going_back is not None:
            self._membership.go_back(replayed.going_back)
            if self._snapshots is not None:
                since = self._membership.progress.since
                self._snapshots.went_back(replayed.going_back, since)
        for worker in self._standings.keys() - living:
            self._membership.lose(worker)  # it was written off before
            self._workers.expel(worker)
        self._workers.shun(replayed.shunned_nodes)
        self._workers.retire(replayed.draining & living, dismiss=False)
        self._workers.retire(replayed.leaving & living, dismiss=True)
