"""The coordinator: one actor that knows who is there and keeps the run's records.

Workers wait in `join` for an answer and in `watch` for a call; node agents report deaths; the lead
worker reports committed steps; the replica that saves hands in receipts. Nothing of this is on the
step path. All methods run on one event loop, so none needs a lock.

    Coordinator ── the calls that others make
      Membership ── decides (`membership/`)
      Dispatcher ── carries it out, wakes those who wait
      RunLog ── writes it down
      Workers, NodeAgents ── who has started, who will go, who is lost; leases
      Failover ── the run after a restart of the coordinator
      HealNews, Receipts, Restores, Snapshots, Injections ── what the workers tell of each
      Uploaders ── who writes what the workers have copied
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from checkpointing import Receipt, StoreUnavailableError
from elastic.coordinator.agents import NodeAgents
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.failover import Failover
from elastic.coordinator.fault_injection import Injections
from elastic.coordinator.heal_news import HealNews
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.replay import replay
from elastic.coordinator.restores import Restores
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.snapshots import Snapshots, start_holder
from elastic.coordinator.store_keys import sweep_store
from elastic.coordinator.uploaders import Uploaders
from elastic.coordinator.workers import Workers
from elastic.membership.decisions import Effects
from elastic.membership.machine import Membership
from elastic.node.snapshot_holder import HeldSnapshot
from elastic.protocol import events
from elastic.protocol.faults import FaultPlan
from elastic.protocol.messages import Answer, Death, Identity, Report, Signal, Standing, Stop
from elastic.protocol.run_paths import find_checkpoint
from elastic.ray_compat.cluster import host_store, started_anew

log = logging.getLogger(__name__)

MOST_CALLS = 100_000
"""Calls pending in the actor at once: each worker has one in `watch`, and perhaps one in `join`."""

_STORE_RETRY_S = 2.0
"""Before a store that refuses is asked again; it has retries of its own."""

_PEER_LOSS_PATIENCE_S = 1.0
"""A peer's death is known within milliseconds of the exception that it causes."""


class Coordinator:
    """An async Ray actor; the driver makes it and all workers know it."""

    def __init__(self, config: CoordinatorConfig) -> None:
        anew = started_anew()
        self.config = config = _as_stored(config) if anew else config
        host, port, self._store = host_store()
        self._membership = Membership(
            config.groups,
            generation=config.generation,
            restore_step=config.restore_step,
            snapshot_step=0 if config.snapshot is None else config.snapshot.step,
            meet=(host, port),
        )
        self._records = RunLog(config, self._membership)
        self._dispatcher = Dispatcher(self._membership, self._records, self._carry_on)
        self._snapshots = self._make_snapshots()
        self._agents = NodeAgents(config.health, (host, port))
        self._workers = Workers(
            config, self._membership, self._dispatcher, self._records, self._agents, self._snapshots
        )
        faults = FaultPlan(config.faults, config.slots)
        self._injections = Injections(
            faults, self._membership, self._dispatcher, self._workers, self._records
        )
        self._heal_news = HealNews(self._membership, self._dispatcher, self._workers, self._records)
        self._receipts = Receipts(config, self._membership, self._dispatcher, self._records)
        self._uploaders = Uploaders(config.paths, config.checkpoint.segment_bytes)
        self._restores = Restores(
            config, self._membership, self._dispatcher, self._records, self._receipts
        )
        self._hellos = 0
        self._raised: dict[str, int | None] = {}
        """Worker whose own code raised, and it is not settled why -> its formation."""
        self._at_fault: set[str] = set()
        """Those of them that will be written off."""
        self._start: asyncio.TimerHandle | None = None
        """When the first replicas begin without those that have not come."""
        self._failover: Failover | None = None
        if anew:
            self._failover = self._replay(faults)
        else:
            self._dispatcher.ready.set()
        self._records.begin(anew=anew)

    def _make_snapshots(self) -> Snapshots:
        return Snapshots(
            self.config.paths,
            self._membership,
            partial(start_holder, self.config.paths.memory),
            self._records.note,
            versions=self.config.started.versions,
            found=self.config.snapshot,
            timeout_s=self.config.health.collective_timeout_s,
        )

    def _replay(self, faults: FaultPlan) -> Failover:
        """The run as its records have it, to be taken up where its workers stand."""
        replayed = replay(self.config.paths, self.config.started.start_step)
        self._records.restored = replayed.restored
        self._hellos = replayed.started
        self._workers.draining_nodes.update(replayed.draining_nodes)
        faults.count_as_fired(replayed.fired)
        self._receipts.replay(replayed.committed)
        snapshots = self._snapshots if self.config.in_memory else None
        return Failover(replayed, self._membership, self._dispatcher, self._workers, snapshots)

    def _carry_on(self, effects: Effects) -> None:
        """What follows from a decision for others than those who wait."""
        regrouped = effects.regrouped
        if regrouped is not None and regrouped.outcome in ("start", "restore"):
            self._snapshots.went_back(regrouped.step, regrouped.roster.generation)
        if regrouped is not None:
            self._dispatcher.spawn(self._sweep(regrouped.roster.generation - 1))
        if effects.signals:
            self._dispatcher.spawn(self._workers.lose_laggards(effects.signals))

    async def _sweep(self, generation: int) -> None:
        """Deletes what groups older than `generation` have left in the store."""
        oldest = self._membership.formations.oldest
        try:
            await asyncio.to_thread(
                sweep_store, self._store, generation=generation, formation=oldest
            )
        except RuntimeError as error:  # it costs memory, and no more
            log.warning("the store was not swept: %s", error)

    def _put_off_start(self) -> None:
        """At the start all workers are waited for, as long as they come: neighbours then get into
        one replica."""
        if self._start is not None:
            self._start.cancel()
        if self._membership.formations.begun == 0:
            loop = asyncio.get_running_loop()
            self._start = loop.call_later(
                self.config.health.regroup_timeout_s, lambda: self._dispatcher.spawn(self._begin())
            )

    async def _begin(self) -> None:
        self._membership.formations.wait_no_longer()
        await self._dispatcher.advance()

    @property
    def _failing_over(self) -> Failover | None:
        """While a coordinator that was started anew does not know the run yet."""
        return None if self._dispatcher.ready.is_set() else self._failover

    async def _gate(self) -> None:
        """Calls that need to know the run wait here until a coordinator started anew knows it."""
        if (failover := self._failing_over) is not None:
            failover.begin()
            await self._dispatcher.ready.wait()

    # -- workers -----------------------------------------------------------------------------------

    async def expect(self, workers: int) -> None:
        """The controller has machines for so many of the first workers, and is about to start them:
        no others are waited for."""
        await self._gate()
        self._membership.formations.expect(workers)

    async def resume(self, standing: Standing) -> None:
        """A worker that has lost its line to the coordinator says where it stands. One that was
        started anew learns so what it must know, and then goes on as if nothing had happened."""
        if (failover := self._failing_over) is not None:
            await failover.hear(standing)

    async def hello(self, identity: Identity) -> None:
        """A worker has started: its process is watched from now on."""
        failover = self._failing_over
        if failover is not None and failover.awaits(identity.worker):
            await failover.hear(Standing(identity=identity))  # its hello was not answered
            return
        await self._gate()
        self._hellos += 1
        self._records.note(
            events.WorkerJoined(
                time=time.time(), worker=identity.worker, node=identity.node, pid=identity.pid
            )
        )
        self._put_off_start()
        self._workers.watch(identity)
        if identity.node in self._workers.draining_nodes:
            await self._workers.drain(
                [identity.worker], "its node is draining", None, identity.node
            )

    async def join(self, report: Report) -> Answer:
        """A worker reports what it has and waits for what to do. No worker joins unwatched."""
        await self._gate()
        await self._workers.until_watched(report.identity.worker)
        if report.recent:
            self._take_steps(report.recent)
        self._put_off_start()
        return await self._dispatcher.join(report)

    async def watch(self, worker: str, seen: int) -> Signal | None:
        """Waits for a call to `worker` later than signal `seen`; None when the run is over."""
        return await self._dispatcher.watch(worker, seen)

    async def trouble(self, worker: str, step: int | None, detail: str, of_a_group: bool) -> str:
        """A worker's own code raised. Was it the loss of a peer, or its own fault? An error of a
        process group may be the first sign of the loss of a whole node, which takes longer to show.
        Workers of one replica that raise errors of their own at the same time are each at fault:
        the first to be written off explains no other.

        Returns:
            "peer": join again; "own": the worker is written off and must exit.
        """
        await self._gate()
        membership = self._membership
        node_s = self.config.health.node_timeout_s + _PEER_LOSS_PATIENCE_S
        patience_s = node_s if of_a_group else _PEER_LOSS_PATIENCE_S
        formation = membership.formation_of(worker)
        if not of_a_group:
            self._raised[worker] = formation
        try:
            await self._dispatcher.until(lambda: membership.replica_broken(worker), patience_s)
            if membership.replica_broken(worker) and worker not in self._at_fault:
                return "peer"
            self._at_fault |= {w for w, formed in self._raised.items() if formed == formation}
            await self._workers.lose(worker, "user_error", detail, step, formation)
            return "own"
        finally:
            self._raised.pop(worker, None)
            self._at_fault.discard(worker)

    async def fail(self, error: str) -> None:
        """Ends the run with an error that no retry can mend."""
        await self._gate()
        await self._dispatcher.stop(error)

    async def record(self, steps: list[events.StepRecord], happened: list[events.Event]) -> bool:
        """Committed steps from the lead worker, events from any; steps known already are passed by.

        Returns:
            Whether the lead is to have a checkpoint written.
        """
        await self._gate()
        self._take_steps(steps)
        for event in happened:
            self._records.note(event)
        if self._membership.stopped is not None:
            await self._dispatcher.advance()
        return bool(steps) and self._workers.take_save_wish()

    def _take_steps(self, steps: Sequence[events.StepRecord]) -> None:
        self._records.take_steps(steps)
        self._injections.hit_spares()

    async def claim_fault(self, index: int, slot: int, step: int, worker: str) -> bool:
        """Whether injected fault `index` hits the worker in `slot` now."""
        await self._gate()
        return await self._injections.claim(index, slot, step, worker)

    async def caught_up(self, worker: str, size: int, seconds: float, steps: int) -> None:
        """A newcomer's worker has received `size` bytes of state, in `seconds`, and made up for
        `steps` steps."""
        await self._gate()
        await self._heal_news.caught_up(worker, size, seconds, steps)

    async def heal_failed(self, worker: str, reason: str) -> None:
        """A newcomer's worker did not get the state."""
        await self._gate()
        await self._heal_news.failed(worker, reason)

    async def compare(self, slot: str, digest: str) -> None:
        """A worker's state at the end: the workers in `slot` of all replicas must agree."""
        if not self._records.compare(slot, digest):
            await self.fail(f"replicas differ at the end of the run in {slot}: this is a bug")

    async def corrupt(self, worker: str, detail: str) -> None:
        """A worker's state is not that of most replicas: it leaves."""
        await self._gate()
        await self._workers.lose(worker, "corruption", detail)

    # -- checkpoints -------------------------------------------------------------------------------

    async def uploader(self, node: str) -> Any:
        """The actor that writes the saves of the workers on `node`."""
        return self._uploaders.of(node)

    async def receipt(
        self, receipt: Receipt, training_state: dict[str, Any], started: float, writers: int
    ) -> None:
        """A part of a checkpoint is written; the receipt of the last of `writers` commits it."""
        await self._gate()
        await self._receipts.take(receipt, training_state, started, writers)

    async def save_failed(self, step: int, reason: str) -> None:
        """A checkpoint could not be written. Unless it was the last one, the run goes on."""
        await self._gate()
        await self._receipts.failed(step, reason)

    async def saved(self, step: int) -> bool:
        """Whether a checkpoint of `step` is committed."""
        return self._receipts.saved(step)

    async def newest_saved(self) -> tuple[int, int] | None:
        """Step and generation of the checkpoint that the next one may refer to, if any."""
        return await self._receipts.newest()

    async def checkpoint_failed(
        self, step: int, generation: int, reason: str, damaged: bool
    ) -> None:
        """The workers of a roster cannot read the checkpoint of `step`: `damaged`, or out of
        reach."""
        await self._gate()
        await self._restores.failed(step, generation, reason, damaged)

    async def snapshot_part(
        self,
        receipt: Receipt,
        training_state: dict[str, Any],
        node: str,
        started: float,
        writers: int,
    ) -> None:
        """One of `writers` parts of a snapshot is written to the memory of `node`."""
        await self._gate()
        await self._snapshots.take(receipt, training_state, node, started, writers)

    async def snapshot_skipped(self, step: int, reason: str) -> None:
        """A part of a snapshot could not be written; the run goes on."""
        await self._gate()
        await self._snapshots.skipped(step, reason)

    async def snapshot(self, step: int) -> HeldSnapshot | None:
        """Where the snapshot of `step` lies; None where it is not to be had any more."""
        await self._gate()
        return self._snapshots.find(step)

    async def snapshot_failed(self, step: int, reason: str) -> None:
        """A worker could not read the snapshot of `step`."""
        await self._gate()
        await self._snapshots.failed(step, reason)

    # -- machines ----------------------------------------------------------------------------------

    async def drain(self, node: str, deadline: float | None, reason: str) -> None:
        """A machine will go, by `deadline` in seconds since the epoch: its workers leave training
        after a step, and those that start on it get no slot."""
        await self._gate()
        left_s = None if deadline is None else deadline - time.time()
        await self._workers.drain_node(node, left_s, reason)

    async def drain_worker(self, worker: str, reason: str) -> None:
        """A worker was told to end: it leaves training after a step, and then ends."""
        await self._gate()
        await self._workers.drain([worker], reason, None, None)

    async def beat(self, node: str, token: str, deaths: list[Death]) -> bool:
        """A node's agent says that the node is there, and which workers died since its last word.

        Returns:
            False: the node was written off; the agent ends its workers and leaves.
        """
        if not self._agents.renew(node, token):
            return False
        if deaths and (failover := self._failing_over) is not None:
            await failover.count_dead(deaths)
        if deaths:
            # It may wait, and the agent's beats must not.
            self._dispatcher.spawn(self._lose(deaths))
        return True

    async def helper_started(self, node: str, helper: str, pid: int) -> None:
        """A helper of a node has started, as process `pid`: it is watched from now on."""
        self._agents.watch_helper(node, helper, pid)

    async def helper_killed(self, node: str, helper: str, detail: str) -> None:
        """A helper was frozen, and its node's agent has killed it."""
        self._records.note(
            events.HelperKilled(time=time.time(), node=node, helper=helper, detail=detail)
        )

    async def _lose(self, deaths: list[Death]) -> None:
        for death in deaths:
            await self._workers.lose(death.worker, death.cause, death.detail)

    # -- the driver --------------------------------------------------------------------------------

    async def observe(self) -> tuple[list[events.StepRecord], list[events.Event]]:
        """Step records and events since the last call; the files keep them all."""
        return self._records.observe()

    async def verdict(self) -> Stop | None:
        """How the run ended; None while it goes on."""
        return self._membership.stopped

    async def over(self) -> None:
        """Returns when the run has ended."""
        await self._dispatcher.until(lambda: self._membership.stopped is not None)

    async def hellos(self) -> int:
        """Workers that have started so far."""
        return self._hellos

    async def ended(self, workers: list[tuple[str, int]]) -> None:
        """Ray Train's controller has seen the end of these, each given by node and process."""
        await self._gate()
        await self._workers.lose_unwatched(workers)

    async def end(self, outcome: events.RunOutcome, error: str | None) -> None:
        """Writes the last event and closes the records."""
        self._records.end(outcome, error)


def _as_stored(config: CoordinatorConfig) -> CoordinatorConfig:
    """The run's config for a coordinator that is started anew, in the middle of it.

    No step waits for it, so a store that does not answer is asked until it does.
    """
    while True:
        try:
            stored = find_checkpoint(config.paths)
        except StoreUnavailableError as error:
            log.warning("a coordinator started anew does not know the checkpoints yet: %s", error)
            time.sleep(_STORE_RETRY_S)
        else:
            return replace(config, restore_step=0 if stored is None else stored.step, snapshot=None)
