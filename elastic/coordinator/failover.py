"""A coordinator that was started anew takes up the run: it asks the workers where they stand.

a call comes, or a worker says where it stands ──► those that the records name are watched
     ──► all have spoken, or are known to be gone; or nobody has spoken for too long. So with the
         nodes, asked which snapshots their memory holds ──► membership goes on
     ──► `ready`: calls that waited go on, the silent are written off

Who is silent may be healthy: it says where it stands from Python, and libraries hold the
interpreter's lock for long. The agent of its node knows: it tells who has died, and ends whom it
finds frozen, by the rules of the heartbeat. So it is waited for as long as those allow, and where
no agent beats, as long as one may take to start. That begins again whenever somebody speaks: of
thousands the last come late.

Records may end before the coordinator did, where its machine was lost with a cache of them. Nothing
that anybody was told is missing (`RunLog.durable`). But who speaks up is one of the run, whether
the records name it or not, unless they say that it was lost. A coordinator whose own link was down
has lost all nodes but its own: those that speak up are taken back, where no roster stood since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from elastic.coordinator.arrivals import Arrivals
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.replay import Replay
from elastic.coordinator.snapshots import Snapshots
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.node.process_watch import LOCKED_TIMES
from elastic.protocol.causes import CRASH
from elastic.protocol.messages import Identity, Standing
from health.lease import AwakeClock

_SEAT_UNKNOWN = -1

_LOOKS = 20
"""How often to look at the clock while nobody speaks, before that has taken too long."""


class Failover:
    """Hears the workers and the nodes, then lets membership go on from what they say.

    Args:
        replayed: what the records say.
        membership: goes on from what the workers say.
        dispatcher: `ready` is set at the end.
        workers: watches the workers, and loses the silent.
        arrivals: takes in those that are in no record.
        snapshots: looks for what the nodes hold; None where the run takes none.
        silent_s: how long to wait, while nobody speaks, for workers whose nodes have no agent.
        locked_s: and for those that an agent watches: no heartbeat may stand still for longer.
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
        locked_s: float,
        take_back: Callable[[Sequence[str]], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._take_back = take_back
        self._silent_s, self._locked_s = min(silent_s, locked_s), locked_s
        self._on_ready = on_ready
        self._replayed, self._membership, self._dispatcher = replayed, membership, dispatcher
        self._workers, self._arrivals, self._snapshots = workers, arrivals, snapshots
        self._standings: dict[str, Standing] = {}
        self._missing = set(replayed.workers)
        """Workers that lived, and have not spoken."""
        self._look_s = self._silent_s / _LOOKS
        self._clock = AwakeClock(self._look_s)
        self._heard_s = 0.0
        """When somebody spoke for the first time last, on that clock."""
        self._begun = False

    def begin(self) -> None:
        """Begins, at the first call that shows that the run lives."""
        if not self._begun:
            self._begun = True
            self._dispatcher.spawn(self._run())

    def awaits(self, worker: str) -> bool:
        """Whether `worker` is one that lived, and is to say where it stands."""
        return worker in self._replayed.workers

    def has_heard(self, worker: str) -> bool:
        """Whether `worker` has said where it stands."""
        return worker in self._standings

    async def hear(self, standing: Standing) -> None:
        """A worker says where it stands."""
        worker = standing.identity.worker
        if worker not in self._standings:
            self._heard_s = self._clock.tick(time.monotonic())
        self._standings[worker] = standing
        self._missing.discard(worker)
        self._workers.watch(standing.identity)
        self.begin()
        await self._dispatcher.tell()

    async def _run(self) -> None:
        """Waits for the workers that lived when the last coordinator was lost; writes off those
        that do not speak up. Nothing is decided before the nodes have said what they hold: the run
        might go back further than it must."""
        # Those just written off may live: the signal that was to end them may not have been sent.
        missing = [self._replayed.workers[worker] for worker in self._missing]
        for joined in (*missing, *self._replayed.written_off.values()):
            if joined.worker in self._standings:
                continue
            self._workers.watch(
                Identity(
                    worker=joined.worker,
                    rank=_SEAT_UNKNOWN,
                    node=joined.node,
                    pid=joined.pid,
                    born_ticks=joined.born_ticks,
                    heartbeat_fd=joined.heartbeat_fd,
                )
            )
        await asyncio.gather(self._until_heard(), self._look_for_snapshots())
        expected, unheard = self._replayed.workers, self._replayed.unheard
        living = self._standings.keys() - self._replayed.lost
        self._go_on(living)
        for worker in living:
            standing = self._standings[worker]
            if standing.formed == standing.generation == 0:  # it has had no place
                self._arrivals.await_join(worker)
        self._take_back([self._standings[w].identity.node for w in living & unheard])
        silent = {w: self._describe_silence(w) for w in self._missing - self._workers.gone}
        self._dispatcher.ready.set()
        self._on_ready()
        for worker in sorted(living - (expected.keys() - unheard)):
            await self._arrivals.hello(self._standings[worker].identity, joins=False)
        for worker, detail in sorted(silent.items()):
            await self._workers.kill(worker, CRASH, detail)
        await self._dispatcher.advance()

    async def _until_heard(self) -> None:
        """Waits until all have spoken or are known to be gone; or the rest have had their time."""
        self._heard_s = self._clock.tick(time.monotonic())
        while not self._all_known():
            for_s = self._clock.tick(time.monotonic()) - self._heard_s
            if for_s > self._locked_s or (for_s > self._silent_s and not self._any_watched()):
                return
            await self._dispatcher.until(self._all_known, self._look_s)

    def _all_known(self) -> bool:
        """Costs next to nothing, for it is asked whenever one of thousands speaks."""
        return self._missing <= self._workers.gone

    def _any_watched(self) -> bool:
        return any(map(self._workers.is_watched, self._missing - self._workers.gone))

    def _describe_silence(self, worker: str) -> str:
        why = f"{self._silent_s:g} s, and its node has no agent that beats"
        if self._workers.is_watched(worker):
            why = f"{self._locked_s:g} s ({LOCKED_TIMES:g} times health.freeze_timeout_s)"
        return f"said nothing to the coordinator that was started anew, nor did others, for {why}"

    async def _look_for_snapshots(self) -> None:
        if self._snapshots is not None:
            await self._snapshots.look_again()

    def _go_on(self, living: set[str]) -> None:
        replayed = self._replayed
        self._membership.resume(
            [self._standings[worker] for worker in sorted(living)],
            generation=replayed.generation,
            restored=replayed.restored,
            formations=replayed.formations,
            recorded=replayed.recorded,
            began=replayed.began,
            until=replayed.until,
            lost=replayed.lost | (replayed.unheard - living),
        )
        if replayed.going_back is not None:
            self._membership.go_back(replayed.going_back)
            if self._snapshots is not None:
                since = self._membership.progress.since
                self._snapshots.went_back(replayed.going_back, since)
        self._missing -= replayed.unheard  # their loss is in the records
        unheard = replayed.unheard & replayed.workers.keys()  # others are watched by nobody
        gone = replayed.written_off.keys() | unheard | self._standings.keys()
        for worker in gone - living:
            self._workers.expel(worker)
        self._workers.shun(replayed.shunned_nodes)
        self._workers.retire(replayed.draining & living, dismiss=False)
        self._workers.retire(replayed.leaving & living, dismiss=True)
