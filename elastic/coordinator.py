"""The coordinator: one actor that knows who is there and keeps the run's records.

It carries out what `membership.py` decides. Workers wait in `join` for an answer and in `watch` for
a call; node agents report deaths; the lead worker reports committed steps; the replica that saves
hands in receipts. Nothing of this is on the step path. All methods run on one event loop, so none
needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from checkpointing import CheckpointConfig, Receipt, Snapshot
from elastic import events
from elastic.agents import NodeAgents
from elastic.config import HealthConfig
from elastic.decisions import Effects, GroupConfig, Regrouped
from elastic.failure import Loss, decide_failure
from elastic.faults import Fault, FaultPlan
from elastic.membership import Membership
from elastic.messages import Answer, Death, Identity, Report, Signal, Standing, Stop
from elastic.publisher import Publisher
from elastic.ray_compat import host_store, started_anew
from elastic.recall import recall
from elastic.records import RunPaths
from elastic.resume import find_checkpoint
from elastic.snapshot_holder import HeldSnapshot
from elastic.snapshot_survey import find_snapshot
from elastic.snapshots import Snapshots
from trainer.samples import Ledger, LedgerError

log = logging.getLogger(__name__)

MOST_CALLS = 100_000
"""Calls pending in the actor at once: each worker has one in `watch`, and perhaps one in `join`."""

_NO_GC_S = 3.0
"""A regroup is over by then, or waits for machines."""

_TAKE_UP_S = 10.0
"""How long a coordinator that was started anew waits for the workers to say where they stand."""
_SILENT = f"said nothing for {_TAKE_UP_S:g} s after the coordinator was started anew"

_PEER_LOSS_PATIENCE_S = 1.0
"""A peer's death is known within milliseconds of the exception that it causes."""

_MOST_FAILED_HEALS = 3
"""Heals of one replica that fail with nobody lost, before its worker is taken for the cause."""

_TOGETHER_S = 5.0
"""How long an injected fault waits for the other workers that it is to hit at the same time."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """What the coordinator needs to know about the run."""

    groups: GroupConfig
    """Sizes."""
    paths: RunPaths
    """Where the records go."""
    health: HealthConfig
    """Bounds and budgets."""
    checkpoint: CheckpointConfig
    """Retention."""
    generation: int
    """The last generation that anything was written under."""
    restore_step: int
    """Step of the newest checkpoint; 0 without one."""
    snapshot: Snapshot | None
    """A newer state that an earlier start left in the nodes' memory."""
    started: events.RunStarted
    """The run's first event."""
    faults: tuple[Fault, ...]
    """Faults to inject."""
    ledger: Ledger
    """Which samples each step must take."""

    @property
    def slots(self) -> int:
        """Workers of the full layout, spares not counted."""
        return self.groups.max_replicas * self.groups.workers_per_replica


class Coordinator:
    """See the module. An async Ray actor; the driver makes it and all workers know it."""

    def __init__(self, config: CoordinatorConfig) -> None:
        anew = started_anew()
        if anew:
            stored = find_checkpoint(config.paths)
            step = 0 if stored is None else stored.step
            config = replace(config, restore_step=step, snapshot=None)
        self.config = config
        self.membership = Membership(
            config.groups,
            generation=config.generation,
            restore_step=config.restore_step,
            snapshot_step=0 if config.snapshot is None else config.snapshot.step,
        )
        self.host, self.port, self._store = host_store()
        self.membership.meet = self.host, self.port
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._signals: dict[str, Signal] = {}
        self._bells: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Worker -> what wakes its call of `watch`; each its own, for there are thousands."""
        self._news = asyncio.Condition()
        """A worker was lost, the run has ended, or an injected fault has hit."""
        self._agents = NodeAgents(config.health, (self.host, self.port))
        self._watches: dict[str, Any] = {}
        self._started: dict[str, Identity] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._losses: list[Loss] = []
        self._heals: dict[str, tuple[int, float, int]] = {}
        self._draining: set[str] = set()
        self._draining_nodes: set[str] = set()
        self._faults = FaultPlan(config.faults, config.slots)
        self._publisher = Publisher(
            config.paths,
            config.checkpoint,
            versions=config.started.versions,
            workers=config.groups.workers_per_replica,
            newest=config.restore_step,
        )
        self._snapshots = self._make_snapshots(config.snapshot)
        self._restored = 0
        """Generation that last began from a checkpoint: what older ones still write is void."""
        self._digests: dict[str, str] = {}
        self._short_of = 0
        self._hellos = 0
        self._standings: dict[str, Standing] = {}
        self._dead_early: set[str] = set()
        """Workers whose death was told while their standings were waited for."""
        self._taking_up = self._checking_leases = False
        self._ready = asyncio.Event()
        """Set but while a coordinator that was started anew asks the workers where they stand."""
        self.steps: list[events.StepRecord] = []
        self.events: list[events.Event] = []
        config.paths.root.mkdir(parents=True, exist_ok=True)
        self._event_log = events.EventLog(config.paths.events)
        self._step_log = events.EventLog(config.paths.steps)
        if anew:
            self._recalled = recall(config.paths, config.started.start_step)
        else:
            self._ready.set()
            self._note(config.started)
        self._note(events.CoordinatorStarted(time=time.time(), pid=os.getpid(), anew=anew))

    def _make_snapshots(self, found: Snapshot | None) -> Snapshots:
        return Snapshots(
            self.config.paths,
            self.membership,
            self._note,
            workers=self.config.groups.workers_per_replica,
            versions=self.config.started.versions,
            found=found,
            timeout_s=self.config.health.collective_timeout_s,
        )

    # -- after a restart ---------------------------------------------------------------------------

    async def resume(self, standing: Standing) -> None:
        """A worker that has lost its line to the coordinator says where it stands. One that was
        started anew learns so what it must know, and then goes on as if nothing had happened."""
        if self._ready.is_set():
            return
        worker = standing.identity.worker
        self._standings[worker] = standing
        self._watch_process(standing.identity)
        self._begin_take_up()
        await self._tell()

    async def _gate(self) -> None:
        """Calls that need to know the run wait here until a coordinator started anew knows it."""
        if not self._ready.is_set():
            self._begin_take_up()
            await self._ready.wait()

    def _begin_take_up(self) -> None:
        if not self._taking_up:
            self._taking_up = True
            self._spawn(self._take_up())

    async def _take_up(self) -> None:
        """Waits for the workers that lived when the last coordinator was lost; writes off those
        that have died, or do not speak up."""
        expected = self._recalled.workers
        for worker, joined in expected.items():
            if worker not in self._standings:
                self._watch_process(
                    Identity(worker=worker, rank=0, node=joined.node, pid=joined.pid)
                )
        async with self._news:
            with contextlib.suppress(asyncio.TimeoutError):
                heard = self._news.wait_for(
                    lambda: expected.keys() <= self._standings.keys() | self._dead_early
                )
                await asyncio.wait_for(heard, _TAKE_UP_S)
        living = expected.keys() & self._standings.keys()
        self.membership.resume(
            [self._standings[worker] for worker in sorted(living)],
            generation=self._recalled.generation,
            formations=self._recalled.formations,
            recorded=self._recalled.recorded,
        )
        for worker in self._standings.keys() - living:
            self.membership.lose(worker)  # it was written off before
        self._restored = self._recalled.restored
        self._faults.count_as_fired(self._recalled.fired)
        self._draining_nodes.update(self._recalled.draining_nodes)
        for worker in self._recalled.draining & living:
            self._draining.add(worker)
            self.membership.drain(worker)
        self._ready.set()
        for worker in expected.keys() - living - self._dead_early:
            await self._lose(worker, "crash", _SILENT, None)
        await self._advance()
        if self.config.checkpoint.memory_every is not None:
            found = await asyncio.to_thread(find_snapshot, self.config.paths)
            self._snapshots = self._make_snapshots(found)
            for node in {identity.node for identity in self._started.values()}:
                self._snapshots.node_joined(node)

    # -- workers -----------------------------------------------------------------------------------

    async def hello(self, identity: Identity) -> None:
        """A worker has started: its process is watched from now on."""
        await self._gate()
        self._hellos += 1
        self._note(
            events.WorkerJoined(
                time=time.time(), worker=identity.worker, node=identity.node, pid=identity.pid
            )
        )
        self._watch_process(identity)
        if identity.node in self._draining_nodes:
            await self._drain([identity.worker], "its node is draining", None)

    def _watch_process(self, identity: Identity) -> None:
        if not self._checking_leases:
            self._checking_leases = True
            self._spawn(self._check_leases())
        self._started[identity.worker] = identity
        token = self._agents.start(identity.node, ray.get_runtime_context().current_actor)
        if token is not None:
            self._spawn(self._await_agent(identity.node, token))
            if self.config.checkpoint.memory_every is not None:
                self._snapshots.node_joined(identity.node)
        self._watches[identity.worker] = self._agents.watch(identity)

    async def join(self, report: Report) -> Answer:
        """A worker reports what it has and waits for what to do. No worker joins unwatched."""
        await self._gate()
        worker = report.identity.worker
        if worker in self._watches:
            await self._watches.pop(worker)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[worker] = answer
        self._take_steps(report.recent)
        self.membership.join(report)
        await self._advance()
        return await answer

    async def watch(self, worker: str, seen: int) -> Signal | None:
        """Waits for a call to `worker` later than signal `seen`; None when the run is over."""
        while True:
            signal = self._signals.get(worker)
            if signal is not None and signal.serial > seen:
                return signal
            if self.membership.stopped is not None:
                return None
            await self._bells[worker].wait()

    async def trouble(self, worker: str, step: int | None, detail: str, of_a_group: bool) -> str:
        """A worker's own code raised. Was it the loss of a peer, or its own fault? An error of a
        process group may be the first sign of the loss of a whole node, which takes longer to show.

        Returns:
            "peer": join again; "own": the worker is written off and must exit.
        """
        await self._gate()
        if self.membership.formations.give_up_resumed(worker):
            await self._advance()
            return "peer"
        node_s = self.config.health.node_timeout_s + _PEER_LOSS_PATIENCE_S
        patience_s = node_s if of_a_group else _PEER_LOSS_PATIENCE_S
        async with self._news:
            with contextlib.suppress(asyncio.TimeoutError):
                broken = self._news.wait_for(lambda: self.membership.replica_broken(worker))
                await asyncio.wait_for(broken, patience_s)
        if self.membership.replica_broken(worker):
            return "peer"
        await self._lose(worker, "user_error", detail, step)
        return "own"

    async def fail(self, error: str) -> None:
        """Ends the run with an error that no retry can mend."""
        await self._gate()
        if self.membership.stopped is None:
            self.membership.stopped = Stop(error=error)
            await self._advance()

    async def record(self, steps: list[events.StepRecord], happened: list[events.Event]) -> None:
        """Committed steps from the lead worker, events from any; steps known already are passed
        by."""
        await self._gate()
        self._take_steps(steps)
        for event in happened:
            self._note(event)
        if self.membership.stopped is not None:
            await self._advance()

    def _take_steps(self, steps: Sequence[events.StepRecord]) -> None:
        for step in steps:
            # Steps of older generations were shown when their worker joined for this one.
            current = step.generation == self.membership.generation
            if current and step.step >= self.membership.recorded:
                self._check_ledger(step)
                self._step_log.append(step)
                self.steps.append(step)
                self.membership.recorded = step.step + 1
                self.membership.reached = max(self.membership.reached, step.step + 1)
        self._fire_at_spares()

    def _check_ledger(self, step: events.StepRecord) -> None:
        try:
            self.config.ledger.check(step.step, step.sample_digests)
        except LedgerError as error:
            self.membership.stopped = self.membership.stopped or Stop(error=str(error))

    async def claim_fault(self, index: int, slot: int, step: int, worker: str) -> bool:
        """Whether injected fault `index` hits the worker in `slot` now. Workers that a fault hits
        together get their answers together."""
        await self._gate()
        membership = self.membership
        if not self._faults.claim(index, slot, membership.generation, settled=membership.settled):
            return False
        fault = str(self._faults.faults[index])
        self._note(events.FaultFired(time=time.time(), fault=fault, step=step, worker=worker))
        async with self._news:
            self._news.notify_all()
            with contextlib.suppress(asyncio.TimeoutError):
                together = self._news.wait_for(lambda: self._faults.fired(index))
                await asyncio.wait_for(together, _TOGETHER_S)
        return True

    def _fire_at_spares(self) -> None:
        for fault in self._faults.claim_for_spares(self.membership.recorded):
            spare = self.membership.a_spare()
            if spare is not None:
                step, name = self.membership.recorded - 1, str(fault)
                self._note(events.FaultFired(time=time.time(), fault=name, step=step, worker=spare))
                number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
                self._agents.signal(self.membership.members[spare], number)

    # -- checkpoints -------------------------------------------------------------------------------

    async def receipt(
        self, receipt: Receipt, training_state: dict[str, Any], started: float
    ) -> None:
        """A saving worker has written its slices; the last one's receipt commits the checkpoint.

        After a restore the records lack the steps that were lost. A late checkpoint of those steps,
        by a worker that was cut off or slow, must not become one to restore from.
        """
        await self._gate()
        if receipt.generation < self._restored:
            return
        try:
            size = await self._publisher.take(receipt, training_state)
        except Exception as error:
            await self.save_failed(receipt.step, f"{type(error).__name__}: {error}")
            return
        if size is None:
            return
        now = time.time()
        self.membership.checkpointed(receipt.step)
        self._note(
            events.CheckpointCommitted(
                time=now,
                step=receipt.step,
                generation=receipt.generation,
                bytes=size,
                seconds=now - started,
            )
        )
        await self._advance()

    async def save_failed(self, step: int, reason: str) -> None:
        """A checkpoint could not be written. Unless it was the last one, the run goes on."""
        self._note(events.CheckpointSkipped(time=time.time(), step=step, reason=reason))
        if step >= self.config.groups.steps:
            await self.fail(f"the last checkpoint could not be written: {reason}")

    async def saved(self, step: int) -> bool:
        """Whether a checkpoint of `step` is committed."""
        return self._publisher.saved(step)

    async def snapshot_part(
        self, receipt: Receipt, training_state: dict[str, Any], node: str, started: float
    ) -> None:
        """A saving worker has written its part of a snapshot to the memory of `node`."""
        await self._snapshots.take(receipt, training_state, node, started)

    async def snapshot_skipped(self, step: int, reason: str) -> None:
        """A part of a snapshot could not be written; the run goes on."""
        await self._snapshots.skipped(step, reason)

    async def snapshot(self, step: int) -> HeldSnapshot | None:
        """Where the snapshot of `step` lies; None where it is not to be had any more."""
        return self._snapshots.find(step)

    async def snapshot_failed(self, step: int, reason: str) -> None:
        """A worker could not read the snapshot of `step`."""
        await self._snapshots.failed(step, reason)

    async def compare(self, slot: str, digest: str) -> None:
        """A worker's state at the end: the workers in `slot` of all replicas must agree."""
        known = self._digests.setdefault(slot, digest)
        if known != digest:
            self._note(
                events.ReplicasCompared(
                    time=time.time(), step=self.config.groups.steps, equal=False
                )
            )
            await self.fail(f"replicas differ at the end of the run in {slot}: this is a bug")

    async def corrupt(self, worker: str, detail: str) -> None:
        """A worker's state is not that of most replicas: it leaves."""
        await self._lose(worker, "corruption", detail, None)

    # -- heals and machines that go ----------------------------------------------------------------

    async def caught_up(self, worker: str, size: int, seconds: float, steps: int) -> None:
        """A newcomer's worker has received `size` bytes of state, in `seconds`, and made up for
        `steps` steps."""
        await self._gate()
        self._heals[worker] = (size, seconds, steps)
        source = self.membership.source_of(worker)
        replica = self.membership.caught_up(worker)
        if replica is None or source is None:
            return
        # Some may have told a coordinator that was lost since.
        found = [self._heals.pop(w) for w in replica.workers if w in self._heals]
        sizes, times, behind = zip(*found, strict=True)
        self._note(
            events.ReplicaHealed(
                time=time.time(),
                generation=self.membership.generation,
                replica=replica.index,
                source=source,
                bytes=sum(sizes),
                seconds=max(times),
                catch_up_steps=max(behind),
            )
        )
        await self._advance()

    async def heal_failed(self, worker: str, reason: str) -> None:
        """A newcomer's worker did not get the state: another source, or, in the end, another
        newcomer."""
        await self._gate()
        replica, source = self.membership.slot_name(worker), self.membership.source_of(worker)
        failures = self.membership.heals.failed(worker)
        if replica is None or source is None or failures == 0:
            return
        self._note(events.HealFailed(time=time.time(), slot=replica, source=source, reason=reason))
        if failures >= _MOST_FAILED_HEALS:
            self._kill(worker)
            await self._lose(worker, "corruption", f"{failures} heals failed: {reason}", None)
        await self._advance()

    async def drain(self, node: str, deadline: float | None, reason: str) -> None:
        """A machine will go, by `deadline` in seconds since the epoch: its workers leave training
        after a step, and those that start on it get no slot."""
        await self._gate()
        self._draining_nodes.add(node)
        workers = [w for w, identity in self._started.items() if identity.node == node]
        left_s = None if deadline is None else deadline - time.time()
        await self._drain(workers, reason, left_s, node)

    async def drain_worker(self, worker: str, reason: str) -> None:
        """As `drain`, for a single worker."""
        await self._gate()
        await self._drain([worker], reason, None)

    async def _drain(
        self, workers: list[str], reason: str, deadline_s: float | None, node: str | None = None
    ) -> None:
        known = [w for w in workers if w in self._started and w not in self._draining]
        if not known:
            return
        self._draining.update(known)
        self._note(
            events.Draining(
                time=time.time(), workers=known, node=node, reason=reason, deadline_s=deadline_s
            )
        )
        for worker in known:
            self.membership.drain(worker)
        await self._advance()

    # -- deaths ------------------------------------------------------------------------------------

    async def beat(self, node: str, token: str, deaths: list[Death]) -> bool:
        """A node's agent says that the node is there, and which workers died since its last word.

        Returns:
            False: the node was written off; the agent ends its workers and leaves.
        """
        if not self._agents.renew(node, token):
            return False
        if deaths and not self._ready.is_set():
            self._dead_early.update(death.worker for death in deaths)
            await self._tell()
            await self._gate()
        for death in deaths:
            await self._lose(death.worker, death.cause, death.detail, None)
        return True

    async def _lose(self, worker: str, cause: events.Cause, detail: str, step: int | None) -> None:
        await self._gate()
        slot = self.membership.slot_name(worker)
        if worker in self._draining and cause in ("crash", "node"):
            cause = "preemption"
        member, identity = self.membership.lose(worker), self._started.pop(worker, None)
        if identity is None and member is not None:
            await self._advance()
        if identity is None or self.membership.stopped is not None:
            return
        answer = self._answers.pop(worker, None)
        if answer is not None and not answer.done():
            answer.set_result(Stop(error="this worker was written off; it is replaced"))
        self._note(
            events.WorkerLost(
                time=time.time(),
                worker=worker,
                node=identity.node,
                pid=identity.pid,
                slot=slot,
                cause=cause,
                detail=detail,
            )
        )
        self._losses.append(
            Loss(cause=cause, step=step, committed=self.membership.recorded, detail=detail)
        )
        error = decide_failure(self._losses, self.config.health)
        if error is not None:
            self.membership.stopped = Stop(error=error)
        await self._advance()
        await self._tell()

    async def _await_agent(self, node: str, token: str) -> None:
        """Ends when the node's agent does: its workers are lost with it."""
        end = await self._agents.outlive(node)
        if self._agents.forget(node, token):
            await self._lose_node(node, f"its node agent is gone: {end}")

    async def _check_leases(self) -> None:
        """Loses the nodes that were not heard of in time, for as long as the run lasts."""
        while True:
            await asyncio.sleep(self._agents.check_interval_s)
            for node, age_s in self._agents.overdue(time.monotonic()).items():
                self._agents.forget(node)
                limit_s = self.config.health.node_timeout_s
                await self._lose_node(
                    node,
                    f"its node was not heard for {age_s:.1f} s "
                    f"(health.node_timeout_s = {limit_s:g})",
                )

    async def _lose_node(self, node: str, detail: str) -> None:
        self._snapshots.node_lost(node)
        for worker, identity in list(self._started.items()):
            if identity.node == node:
                await self._lose(worker, "node", detail, None)

    async def _kill_laggards(self, called: Mapping[str, Signal]) -> None:
        """Writes off the workers that did not follow a call in time, and ends their processes."""
        timeout_s = self.config.health.regroup_timeout_s
        await asyncio.sleep(timeout_s)
        detail = f"did not regroup in {timeout_s:g} s (health.regroup_timeout_s)"
        for worker in self.membership.calls.laggards(called):
            self._kill(worker)
            await self._lose(worker, "hang", detail, None)

    def _kill(self, worker: str) -> None:
        if worker in self._started:
            self._agents.signal(self._started[worker], signal.SIGKILL)

    # -- effects -----------------------------------------------------------------------------------

    async def _advance(self) -> None:
        try:
            effects = self.membership.advance()
        except Exception:
            # A bug here must end the run with its traceback, not leave everybody waiting.
            self.membership.stopped = Stop(
                error=f"the coordinator failed:\n{traceback.format_exc()}"
            )
            effects = self.membership.advance()
        # Of the many calls and answers that a regroup makes, none is garbage until it is over.
        if effects.called is not None:
            gc.disable()
            asyncio.get_running_loop().call_later(_NO_GC_S, gc.enable)
        if effects.regrouped is not None and effects.regrouped.outcome in ("start", "restore"):
            self._snapshots.went_back(effects.regrouped.step, effects.regrouped.roster.generation)
        self._signals.update(effects.signals)
        for worker, answer in effects.answers.items():
            future = self._answers.pop(worker, None)
            if future is not None and not future.done():
                future.set_result(answer)
        if effects.signals:
            self._spawn(self._kill_laggards(effects.signals))
        going_on = self.membership.stopped is None
        self._write_down(effects)
        over = self.membership.stopped is not None
        if going_on and over:  # it could not be written down
            await self._advance()
        for worker in list(self._bells) if over else effects.signals:
            self._bells.pop(worker, asyncio.Event()).set()
        if over:
            await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _write_down(self, effects: Effects) -> None:
        now = time.time()
        if effects.called is not None:
            self._note(
                events.RegroupCalled(
                    time=now,
                    generation=self.membership.generation + (effects.regrouped is None),
                    reason=effects.called,
                )
            )
        for replica in effects.formed:
            self._note(
                events.ReplicaForming(
                    time=now,
                    formed=replica.formed,
                    replica=replica.index,
                    workers=list(replica.workers),
                )
            )
        if effects.regrouped is not None:
            if effects.regrouped.outcome == "restore":
                self._restored = effects.regrouped.roster.generation
            self._note(_regroup_done(now, effects.regrouped))
        if effects.short_of and effects.short_of != self._short_of:
            self._note(_below_minimum(now, self.membership, effects.short_of))
        self._short_of = effects.short_of

    def _note(self, event: events.Event) -> None:
        self.events.append(event)
        try:
            self._event_log.append(event)
        except OSError as error:
            unwritten = Stop(error=f"the run's records cannot be written: {error}")
            self.membership.stopped = self.membership.stopped or unwritten

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """A failure in the background must end the run with its traceback, not go unseen."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the coordinator failed", exc_info=task.exception())
            detail = "".join(traceback.format_exception(task.exception()))
            self._ready.set()
            self._spawn(self.fail(f"the coordinator failed:\n{detail}"))

    # -- the driver --------------------------------------------------------------------------------

    async def observe(self) -> tuple[list[events.StepRecord], list[events.Event]]:
        """Step records and events since the last call; the files keep them all."""
        steps, self.steps = self.steps, []
        happened, self.events = self.events, []
        return steps, happened

    async def verdict(self) -> Stop | None:
        """How the run ended; None while it goes on."""
        return self.membership.stopped

    async def over(self) -> None:
        """Returns when the run has ended."""
        async with self._news:
            await self._news.wait_for(lambda: self.membership.stopped is not None)

    async def hellos(self) -> int:
        """Workers that have started so far."""
        return self._hellos

    async def end(self, outcome: events.RunOutcome, error: str | None) -> None:
        """Writes the last event and closes the records."""
        stopped = self.membership.stopped
        self.membership.stopped = stopped or Stop(error=f"the run was {outcome}")
        if stopped is not None and stopped.error is None and self._digests:
            self._note(
                events.ReplicasCompared(time=time.time(), step=self.config.groups.steps, equal=True)
            )
        steps = self.membership.recorded - self.config.started.start_step
        if stopped is not None and stopped.error is None:
            self._note(events.LedgerChecked(time=time.time(), steps=steps))
        self._note(
            events.RunEnded(
                time=time.time(), step=self.membership.recorded, outcome=outcome, error=error
            )
        )
        self._event_log.close()
        self._step_log.close()


def _regroup_done(now: float, regrouped: Regrouped) -> events.RegroupDone:
    roster = regrouped.roster
    return events.RegroupDone(
        time=now,
        generation=roster.generation,
        step=regrouped.step,
        replicas=len(roster.replicas),
        lanes={str(index): list(lanes) for index, lanes in roster.lanes.items()},
        outcome=regrouped.outcome,
        lost_steps=regrouped.lost_steps,
        repeated_steps=int(regrouped.outcome == "repeat"),
    )


def _below_minimum(now: float, membership: Membership, missing: int) -> events.BelowMinimum:
    config = membership.config
    return events.BelowMinimum(
        time=now,
        alive=membership.whole_replicas,
        needed=config.min_replicas,
        missing=f"{missing} workers (a replica has {config.workers_per_replica}); add machines or "
        f"lower scaling.min_replicas",
    )
