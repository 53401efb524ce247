"""The run's workers and their nodes: who has started, who is watched, who will go, who is lost."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Set

from elastic.coordinator.agents import START_S, NodeAgents
from elastic.coordinator.aside import Aside
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.evidence import keep_evidence
from elastic.coordinator.own_handle import own_handle
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.snapshots import Snapshots
from elastic.membership.failure import Loss, decide_failure, find_spent
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import CRASH, HANG, NODE, PREEMPTION, RAY_NODE, Cause, entry_of
from elastic.protocol.messages import Death, Identity, Signal
from elastic.ray_compat.cluster import live_nodes
from health.laggards import find_stuck

log = logging.getLogger(__name__)


class Workers:
    """Everybody who has started, with what is known of their processes and machines.

    Args:
        config: bounds and budgets; whether snapshots are taken.
        membership: told of losses and of machines that go.
        dispatcher: carries out what follows.
        records: where it is written down.
        agents: watch the workers and hold the nodes' leases.
        snapshots: told of the nodes.
        aside: where evidence is written.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        membership: Membership,
        dispatcher: Dispatcher,
        records: RunLog,
        agents: NodeAgents,
        snapshots: Snapshots,
        aside: Aside,
    ) -> None:
        self._health, self._membership, self._dispatcher = config.health, membership, dispatcher
        self._records, self._agents = records, agents
        self._snapshots, self._in_memory = snapshots, config.in_memory
        self._incidents, self._aside = config.paths.incidents, aside
        self.started: dict[str, Identity] = {}
        """Workers that have started and were not lost."""
        self.draining_nodes: set[str] = set()
        """Machines that will go."""
        self.shunned_nodes: set[str] = set()
        """Machines that had a worker whose connections fail: those without a slot get none."""
        self._draining: set[str] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._unwatched: set[str] = set()
        self._since_s: dict[tuple[str, int], float] = {}
        """When each was first heard, by node and process: its hello, or the first word to a
        coordinator that was started anew."""
        self._ended: set[tuple[str, int]] = set()
        """Node and process of workers whose end Ray has seen."""
        self.gone: set[str] = set()
        """Workers that are to be written off as soon as a coordinator that was started anew knows
        the run: it does not wait for them to speak."""
        self._losses: list[Loss] = []
        self._checking_leases = False

    # -- arrivals ----------------------------------------------------------------------------------

    def watch(self, identity: Identity) -> None:
        """A worker's process is watched from now on, by the agent of its node."""
        if not self._checking_leases:
            self._checking_leases = True
            self._dispatcher.spawn(self._check_leases())
        self.started[identity.worker] = identity
        self._since_s[identity.node, identity.pid] = time.monotonic()
        token = self._agents.start(identity.node, own_handle())
        if token is not None:
            self._dispatcher.spawn(self._keep_agent(identity.node, token))
            if self._in_memory:
                self._snapshots.node_joined(identity.node)
        watching = self._agents.watch(identity)
        self._watches[identity.worker] = asyncio.get_running_loop().create_task(watching)

    @property
    def processes(self) -> set[tuple[str, int]]:
        """Node and process of each worker that has started and was not lost."""
        return {(one.node, one.pid) for one in self.started.values()}

    def is_watched(self, worker: str) -> bool:
        """Whether the agent of its node beats: it tells of its end, and ends it where it is
        frozen."""
        return self._agents.beats(self.started[worker].node)

    def is_told_of(self, worker: str) -> bool:
        """Whether somebody tells of its end: the agent of its node, or Ray, where Ray drains that
        and starts no other agent."""
        return self.is_watched(worker) or self.started[worker].node in self._unwatched

    def there_s(self, workers: Iterable[tuple[str, int]], now_s: float) -> list[float | None]:
        """For how long each of these, which have ended, was there; None: it was never heard, or was
        asked of before."""
        since_s = [self._since_s.pop(worker, None) for worker in workers]
        return [None if one is None else now_s - one for one in since_s]

    async def until_watched(self, worker: str) -> None:
        """Waits until the agent of its node watches `worker`, where it has one."""
        if worker in self._watches:
            # A join that comes once more waits, too; one that is given up does not end the watch.
            await asyncio.shield(self._watches[worker])
            self._watches.pop(worker, None)

    # -- machines that go --------------------------------------------------------------------------

    async def drain(
        self, workers: Iterable[str], reason: str, left_s: float | None, node: str | None
    ) -> None:
        """`workers` will go with their machine, `node`, in `left_s` if that is known; or, where no
        `node` is named, by themselves."""
        known = [w for w in workers if w in self.started and w not in self._draining]
        if not known:
            return
        self._records.note(
            events.Draining(
                time=time.time(), workers=known, node=node, reason=reason, deadline_s=left_s
            )
        )
        self.retire(known, dismiss=node is None)
        await self._dispatcher.advance()

    def retire(self, workers: Iterable[str], *, dismiss: bool) -> None:
        """`workers` get no slot any more. See `Membership.drain`."""
        for worker in workers:
            self._draining.add(worker)
            self._membership.drain(worker, dismiss=dismiss)

    async def drain_node(self, node: str, left_s: float | None, reason: str) -> None:
        """A machine will go: those that work on it leave, those that start on it get no slot."""
        self.draining_nodes.add(node)
        await self.drain(self._on(node), reason, left_s, node)

    @property
    def nodes(self) -> set[str]:
        """Machines with workers."""
        return {identity.node for identity in self.started.values()}

    @property
    def committed(self) -> int:
        """Steps that the run has committed."""
        return self._membership.progress.recorded

    def work_on(self, node: str) -> bool:
        """Whether the run would miss any worker on a machine: see `Membership.needs`."""
        return any(map(self._membership.needs, self._on(node)))

    def shun(self, nodes: Set[str]) -> None:
        """Whoever is on `nodes` without a slot, or starts there, gets none. Others there have shown
        that their connections carry."""
        self.shunned_nodes.update(nodes)
        for worker in list(self.started):
            self.pass_over(worker)

    def pass_over(self, worker: str) -> None:
        """A worker on a shunned machine gets no slot, where it has none."""
        places = self._membership.places
        if self.started[worker].node in self.shunned_nodes and not (
            places.stands(worker) or worker in places.survivors
        ):
            self._membership.drain(worker)

    def _on(self, node: str) -> list[str]:
        return [worker for worker, identity in self.started.items() if identity.node == node]

    # -- losses ------------------------------------------------------------------------------------

    async def lose(
        self,
        worker: str,
        cause: Cause,
        detail: str,
        step: int | None = None,
        formation: int | None = None,
    ) -> None:
        """Writes a worker off, which was in `step`, in replica `formation`, where that is known.
        Twice does no harm."""
        await self._dispatcher.ready.wait()
        membership = self._membership
        slot = membership.slot_name(worker)
        if worker in self._draining and entry_of(cause).by_departure:
            cause = PREEMPTION
        member, identity = membership.lose(worker), self.started.pop(worker, None)
        if identity is None and member is not None:
            await self._dispatcher.advance()
        if identity is None or membership.stopped is not None:
            return
        self._dispatcher.turn_away(worker)
        now = time.time()
        self._records.note(
            events.WorkerLost(
                time=now,
                worker=worker,
                node=identity.node,
                pid=identity.pid,
                slot=slot,
                cause=cause,
                detail=detail,
            )
        )
        self._count(
            Loss(
                time=now,
                seat=identity.rank,
                cause=cause,
                step=step,
                committed=membership.progress.recorded,
                detail=detail,
                formation=formation,
            )
        )
        await self._dispatcher.advance()
        await self._dispatcher.tell()

    async def lose_all(self, deaths: Iterable[Death]) -> None:
        """Writes off workers of which an agent has told. What was found of them is kept meanwhile:
        a storage that takes its time must not hold up their peers."""
        deaths = list(deaths)
        await self._count_out(death.worker for death in deaths)
        for death in deaths:
            if death.evidence is not None and death.worker in self.started:
                accused, found = {death.worker: death.detail}, {death.worker: death.evidence}
                self._aside.on_thread(keep_evidence, self._incidents, accused, found)
            await self.lose(death.worker, death.cause, death.detail)

    async def _count_out(self, workers: Iterable[str]) -> None:
        """These will be written off, and that waits until the run is known: see `gone`."""
        if not self._dispatcher.ready.is_set():
            self.gone.update(workers)
            await self._dispatcher.tell()

    def _count(self, loss: Loss) -> None:
        self._losses.append(loss)
        failure = decide_failure(self._losses, self._health)
        if failure is not None:
            self._membership.stop(failure.error, failure.cause)

    def spent(self) -> dict[str, tuple[int, int]]:
        """See `find_spent`."""
        return find_spent(self._losses, self._health, self._membership.progress.recorded)

    async def kill(self, worker: str, cause: Cause, detail: str) -> None:
        """Ends a worker's process and writes it off."""
        self.signal(worker, signal.SIGKILL)
        await self.lose(worker, cause, detail)

    def expel(self, worker: str) -> None:
        """Ends the process of a worker that a coordinator before this one has written off. At once
        it counts as started no more: its death may be waiting to be counted."""
        identity = self.started.pop(worker)
        self._dispatcher.spawn(self._agents.signal(identity, signal.SIGKILL))

    def signal(self, worker: str, number: int) -> None:
        """Sends a signal to the process of a worker, where it has started."""
        if worker in self.started:
            self._dispatcher.spawn(self._agents.signal(self.started[worker], number))

    async def lose_laggards(self, called: Mapping[str, Signal]) -> None:
        """Ends the workers that have not followed a call in time, and are stuck. No time counts in
        which answers were held back, or this process was held up."""
        timeout_s = pause_s = self._health.regroup_timeout_s
        while True:
            until_s = self._agents.awake_s() + pause_s
            while (left_s := until_s - self._agents.awake_s()) > 0:
                await asyncio.sleep(left_s)
            laggards = self._laggards(called)
            if not laggards:
                return
            answered_s = self._records.answered_for_s()
            if answered_s < timeout_s:  # they may wait for answers that wait for the storage
                pause_s = timeout_s - answered_s
                continue
            # Of whom nobody can tell is ended, so an agent that has ended has time to be replaced.
            told = await self._agents.places({one.node for one in laggards}, START_S)
            places = {one.worker: told.get(one.worker) for one in laggards}
            groups = self._membership.roster.groups
            stuck, pause_s = find_stuck(places, timeout_s, replicas=groups)
            # Who has come meanwhile may have held a mate up, and is not ended.
            late = {one.worker for one in self._laggards(called)}
            for worker in (each for each in stuck if each in late):
                detail = f"did not regroup in {timeout_s:g} s (health.regroup_timeout_s)"
                if (place := places[worker]) is not None:
                    detail += f": for {place.in_phase_s:.0f} s in {place.phase}"
                await self.kill(worker, HANG, detail)
            pause_s = pause_s or timeout_s  # others may have waited for these, and are to come

    def _laggards(self, called: Mapping[str, Signal]) -> list[Identity]:
        """Workers that have not followed a call yet, and were not lost."""
        late = self._membership.calls.laggards(called)
        return [self.started[worker] for worker in late if worker in self.started]

    async def lose_nodes(self, why: Mapping[str, str]) -> None:
        """Writes off all workers of some nodes, and says why. What ends with a machine that answers
        says little against it."""
        await self._count_out(worker for node in why for worker in self._on(node))
        answers = await asyncio.gather(*map(self._agents.machine_answers, why))
        for (node, detail), alive in zip(why.items(), answers, strict=True):
            await self.lose_node(node, detail, RAY_NODE if alive else NODE)

    async def lose_node(self, node: str, detail: str, cause: Cause) -> None:
        """Writes off all workers of a node."""
        self._snapshots.node_lost(node)
        for worker in self._on(node):
            await self.lose(worker, cause, detail)

    def lose_silent(self, processes: Iterable[tuple[str, int]], silent_s: float) -> None:
        """Writes down that processes, each given by its node, are ended as they have not said hello
        in so long. They have no name of their own, no place, and no part in the budgets: whether
        anything starts at all is for the controller to see. Who has said hello meanwhile is lost as
        others are; twice does no harm."""
        started = self.processes
        for node, pid in processes:
            worker = f"silent-{node[:6]}-{pid}"
            if (node, pid) in started or worker in self._membership.lost:
                continue
            self._membership.lost.add(worker)
            self._records.note(
                events.WorkerLost(
                    time=time.time(),
                    worker=worker,
                    node=node,
                    pid=pid,
                    slot=None,
                    cause=HANG,
                    detail=f"it has not said hello {silent_s:g} s after it was started: what it "
                    f"imports, or its first look at the device, hangs",
                )
            )

    async def lose_unwatched(self, ended: Collection[tuple[str, int]]) -> None:
        """Writes off those of the workers that have `ended`, each by node and process, whose nodes
        have no agent that would know."""
        there = self.processes
        self._ended = (self._ended & there) | (there & set(ended))
        lost = {
            worker: identity.pid
            for worker, identity in self.started.items()
            if identity.node in self._unwatched and (identity.node, identity.pid) in self._ended
        }
        await self._count_out(lost)
        for worker, pid in lost.items():
            await self.lose(worker, CRASH, f"process {pid} ended, as Ray saw")

    async def _keep_agent(self, node: str, token: str) -> None:
        """Starts another agent whenever the node's has ended; its workers go on. They are lost
        where agents keep ending there, or Ray starts none as the machine is gone.

        Ray starts nothing either on a machine that it drains. A coordinator that is started anew
        meanwhile gets no agent there. Its workers have until their machine goes, and Ray sees
        their end.
        """
        while True:
            end, how = await self._agents.outlive(node)
            again = self._agents.ended(node, token, time.monotonic())
            if again is None or self._membership.stopped is not None:
                return
            if end != "ended":
                break
            self._records.note(events.AgentEnded(time=time.time(), node=node, detail=how))
            if not again:
                break
            workers = [self.started[worker] for worker in self._on(node)]
            token = self._agents.start_next(node, own_handle(), workers)
        self._agents.forget(node)
        if end == "refused" and node in await asyncio.to_thread(live_nodes):
            log.warning("the workers on node %s are not watched: Ray drains it", node)
            self._unwatched.add(node)
            self._snapshots.node_lost(node)  # nor a holder of what lies there
            await self.lose_unwatched(())
        else:
            so_often = "s keep ending, the last one" if end == "ended" else " is gone"
            await self.lose_nodes({node: f"its node agent{so_often}: {how}"})

    async def _check_leases(self) -> None:
        """Loses the nodes that were not heard of in time, for as long as the run lasts."""
        await self._agents.listen()
        while True:
            await asyncio.sleep(self._agents.check_interval_s)
            overdue = self._agents.overdue(time.monotonic())
            for node in overdue:
                self._agents.forget(node)
            if overdue:  # it may wait, and other leases run out meanwhile
                self._dispatcher.spawn(self.lose_nodes(overdue))
