"""The coordinator: one actor that knows who is there and keeps the run's records.

Workers wait in `join` for an answer and in `watch` for a call; node agents report deaths; the lead
worker reports committed steps; the replica that saves hands in receipts. Nothing of this is on the
step path. All methods run on one event loop, so none needs a lock.

    Coordinator ── takes the calls that others make, each to the part that it is about
      Membership ── decides (`membership/`)
      Dispatcher ── carries it out, wakes those who wait
      RunLog ── writes it down
      Arrivals, Workers, NodeAgents ── who has started, who will go, who is lost; leases
      Preflight ─── machines that are looked at before their workers get a place
      Troubles ──── what an exception in a worker means
      Remedies ──── verdicts, and the rung of the ladder that each calls for
      Replacements ─ machines that are suspect, and who replaces them
      LastWords ──── what those who are lost wrote last
      StandstillWatch ── who keeps the others, where no step is committed
      SlowWatch ── who is slower than the others, and stays so
      LinkTests ─── whose connections fail, where collectives do and nobody is lost
      Failover ── the run after a restart of the coordinator
      TrainingWatch ── losses that stand out
      Corruption ── whose state was wrong; Retreat ── back to a saved state
      HealNews, Receipts, Restores, Snapshots, Injections ── what the workers tell of each
      Uploaders ── who writes what the workers have copied
      Pulses ────── that the run lives, and how it stands, for those who watch it from outside
      Supervised ─ ends what a run without a supervisor would leave behind
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from checkpointing import CheckpointError, Manifest, Receipt, StoreUnavailableError
from elastic.coordinator.agents import FIRST_START_S, NodeAgents
from elastic.coordinator.arrivals import Arrivals
from elastic.coordinator.aside import Aside
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.corruption import Corruption
from elastic.coordinator.cross_failures import CrossFailures
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.failover import Failover
from elastic.coordinator.fault_injection import Injections
from elastic.coordinator.heal_news import HealNews
from elastic.coordinator.last_words import LastWords
from elastic.coordinator.link_tests import LinkTests
from elastic.coordinator.listening import host_store
from elastic.coordinator.preflight import Preflight
from elastic.coordinator.pulses import Pulses
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.remedies import Remedies
from elastic.coordinator.replacements import Replacements
from elastic.coordinator.replay import Replay, replacements_begun, replay
from elastic.coordinator.restores import Restores
from elastic.coordinator.retreat import Retreat
from elastic.coordinator.run_log import RunLog, await_closed
from elastic.coordinator.save_wish import SaveWish
from elastic.coordinator.slow_watch import SlowWatch
from elastic.coordinator.snapshots import Snapshots, start_holder
from elastic.coordinator.standstill import STEPS, StandstillWatch
from elastic.coordinator.store_keys import Past, sweep_store
from elastic.coordinator.supervised import Supervised
from elastic.coordinator.training_watch import TrainingWatch
from elastic.coordinator.trouble import Troubles
from elastic.coordinator.uploaders import Uploaders
from elastic.coordinator.workers import Workers
from elastic.doctor.finding import Finding
from elastic.membership.decisions import Effects
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.node.agent import NodeAgent
from elastic.node.process_watch import LOCKED_TIMES
from elastic.node.snapshot_holder import SnapshotHolder
from elastic.node.uploader import Uploader
from elastic.protocol import events
from elastic.protocol.causes import Cause
from elastic.protocol.coordinator_api import CoordinatorApi, UnheardError
from elastic.protocol.faults import FaultPlan
from elastic.protocol.messages import (
    Answer,
    Death,
    Helper,
    Identity,
    LinkTest,
    Recorded,
    Report,
    Signal,
    Standing,
    Stop,
)
from elastic.protocol.rpc import Remote
from elastic.protocol.run_identity import newest_own, recorded_identity
from elastic.protocol.saves import HeldSnapshot, UploaderApi
from elastic.ray_compat.cluster import export_actors, is_actor, own_address, started_anew
from elastic.ray_compat.kept import Kept, kept_stop
from elastic.reporting.event_log import (
    events_to_go_on_from,
    present_start,
    read_events,
    recent_steps,
)
from health.recurrence import AGAIN_S
from health.verdict import Sign

log = logging.getLogger(__name__)

MOST_CALLS = 100_000
"""Calls pending in the actor at once: each worker has one in `watch`, and perhaps one in `join`."""

_STORAGE_RETRY_S = 2.0
"""Before one that refuses is asked again; a store has retries of its own."""

_Args = ParamSpec("_Args")
_Reply = TypeVar("_Reply")


def _when_known(
    call: Callable[Concatenate[Coordinator, _Args], Coroutine[Any, Any, _Reply]],
) -> Callable[Concatenate[Coordinator, _Args], Coroutine[Any, Any, _Reply]]:
    """A call that waits until a coordinator started anew knows the run, and whose answer leaves
    when what was written down until then is durable: it may be a promise, and the next coordinator
    has the records alone to know of it."""

    @functools.wraps(call)
    async def gated(self: Coordinator, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Reply:
        await self.known()
        answer = await call(self, *args, **kwargs)
        await self.durable()
        return answer

    return gated


class Coordinator(CoordinatorApi):
    """An async Ray actor, detached and restarted for ever; all workers know it. `CoordinatorApi`
    says what each call means.

    Args:
        config: the run.
    """

    def __init__(self, config: CoordinatorConfig | Kept[CoordinatorConfig]) -> None:
        if isinstance(config, Kept):
            config = config.value
        if is_actor():
            try:
                # Now, as Ray's head is there. Who starts one later must not wait for it.
                export_actors(NodeAgent, SnapshotHolder, Uploader)
            except Exception as error:  # it would be this actor's end: Ray retries no creation
                log.warning("helpers are exported as they are started: %s", error)
        anew = started_anew()
        of_all_starts = (
            _once_answered(partial(_find_records, config))
            if anew
            else read_events(config.paths.events, kinds=[events.NodeReplacement])
        )
        happened = present_start(of_all_starts, config.started.time) if anew else []
        replayed: Replay | None = None
        if happened:
            replayed = _once_answered(
                partial(replay, config.paths, happened, config.started.start_step)
            )
            config = _as_stored(config, replayed)
        self.config = config
        host = own_address()
        self._store = host_store(host)
        self._membership = Membership(
            config.groups,
            Progress(
                generation=config.generation,
                restore_step=config.restore_step,
                snapshot_step=0 if config.snapshot is None else config.snapshot.step,
            ),
            meet=(host, self._store.port),
        )
        self._membership.skips = config.ledger.skips
        open_records = partial(RunLog, config, self._membership)
        self._records = _once_answered(open_records) if anew else open_records()
        self._dispatcher = Dispatcher(self._membership, self._records, self._carry_on)
        self._snapshots = self._make_snapshots()
        self._agents = NodeAgents(config.health, (host, self._store.port))
        # Threads of their own: a storage that hangs holds up neither who asks for a dead raylet nor
        # a provider.
        evidence = Aside(self._membership, self._dispatcher, threads=2)
        self._workers = Workers(
            config,
            self._membership,
            self._dispatcher,
            self._records,
            self._agents,
            self._snapshots,
            evidence,
        )
        faults = FaultPlan(config.faults, config.slots)
        self._injections = Injections(
            faults, self._membership, self._dispatcher, self._workers, self._records
        )
        self._heal_news = HealNews(self._membership, self._dispatcher, self._workers, self._records)
        self._save_wish = SaveWish(self._membership)
        self._records.followers.append(self._save_wish.hear)
        self._receipts = Receipts(
            config, self._membership, self._dispatcher, self._records, self._save_wish
        )
        self._uploaders = Uploaders(config.paths, config.checkpoint.segment_bytes)
        self._restores = Restores(
            config,
            self._membership,
            self._dispatcher,
            self._workers,
            self._records,
            self._receipts,
        )
        self._retreat = Retreat(
            config,
            self._membership,
            self._dispatcher,
            self._records,
            self._receipts,
            self._snapshots,
        )
        self._corruption = Corruption(
            start_step=config.started.start_step,
            compares=config.health.compare_every is not None,
            repeats=(config.started.settings or {}).get("determinism") == "strict",
            membership=self._membership,
            dispatcher=self._dispatcher,
            workers=self._workers,
            records=self._records,
            receipts=self._receipts,
            retreat=self._retreat,
        )
        self._training = TrainingWatch(
            config.health.training,
            config.health.max_nonfinite_steps,
            membership=self._membership,
            dispatcher=self._dispatcher,
            records=self._records,
            receipts=self._receipts,
            retreat=self._retreat,
        )
        self._arrivals = Arrivals(
            self._membership,
            self._dispatcher,
            self._workers,
            self._records,
            config.health.regroup_timeout_s,
        )
        self._link_tests = LinkTests(self._membership, self._workers, self._agents, self._records)
        self._troubles = Troubles(
            config.health,
            self._membership,
            self._dispatcher,
            self._workers,
            self._link_tests,
            config.reads,
        )
        self._cross_failures = CrossFailures(self._membership, self._dispatcher, self._records)
        aside = Aside(self._membership, self._dispatcher)
        self._last_words = LastWords(config.paths, self._agents, self._records, evidence)
        self._replacements = Replacements(
            config,
            self._workers,
            self._records,
            aside,
            self._empty,
            begun=replacements_begun(of_all_starts),
        )
        self._remedies = Remedies(
            self._membership,
            self._dispatcher,
            self._workers,
            self._records,
            self._replacements,
            aside,
        )
        self._preflight = Preflight(
            config.health.preflight,
            self._workers,
            self._agents,
            self._records,
            self._arrivals.until_here,
        )
        # Threads of its own: providers take minutes.
        of_pulses = Aside(self._membership, self._dispatcher, threads=2)
        self._pulses = Pulses(config, self._membership, self._workers, self._records, of_pulses)
        self._standstill = self._watch_for_standstill(evidence)
        self._slow_watch = SlowWatch(
            config.paths.incidents,
            self._membership,
            self._workers,
            self._agents,
            self._records,
            evidence,
            self._remedies.meet if config.health.move_slow else None,
        )
        self._supervised = Supervised(config, self._dispatcher, self._records)
        self._failover: Failover | None = None
        if replayed is not None:
            self._failover = self._replay(faults, replayed, happened)
        else:
            self._training.go_on_from(config.started.start_step)
            self._dispatcher.ready.set()
        self._records.begin(happened)
        if is_actor():
            self._take_up_stop()
            self._supervised.begin()

    def _take_up_stop(self) -> None:
        """The run may have been told to stop while no coordinator could take the call, by a driver
        that is gone (see `keep_stop`)."""
        try:
            reason = kept_stop(self.config.prefix)
        except Exception as error:  # it would be this actor's end: Ray retries no creation
            log.warning("whether the run was told to stop is not known: %s", error)
            return
        if reason is not None:
            self._note_stop(reason)

    def _note_stop(self, reason: str) -> None:
        """The run is to stop. Told once, and again where somebody wants what a signal began: a
        driver that is started again leaves it then."""
        if not self._membership.winding_down or reason == events.BY_HAND:
            self._records.note(events.StopRequested(time=time.time(), reason=reason))
        self._membership.wind_down()

    def _watch_for_standstill(self, evidence: Aside) -> StandstillWatch | None:
        if self.config.health.progress_timeout_s is None:
            return None
        return StandstillWatch(
            self.config.health.progress_timeout_s,
            self.config.health.regroup_timeout_s,
            self.config.paths.incidents,
            self._membership,
            self._dispatcher,
            self._workers,
            self._agents,
            self._link_tests,
            evidence,
            self._cross_failures.take,
        )

    def _make_snapshots(self) -> Snapshots:
        return Snapshots(
            self.config.paths,
            self._membership.progress,
            partial(start_holder, self.config.paths.memory),
            self._records.note,
            versions=self.config.started.versions,
            found=self.config.snapshot,
            timeout_s=self.config.health.collective_timeout_s,
        )

    def _replay(
        self, faults: FaultPlan, replayed: Replay, happened: Sequence[events.Event]
    ) -> Failover:
        """The run as its records have it, to be taken up where its workers stand.

        Args:
            faults: told which went off.
            replayed: what they say.
            happened: all of them. There may be a million, so they are not kept.
        """
        # The end may come before the workers have spoken.
        self._membership.progress.recorded = replayed.recorded
        if self.config.restore_step == 0 and replayed.saved > 0:
            # Or the loss of all copies would have the run begin from the seed, and say nothing.
            self._membership.progress.unreadable = _describe_missing(self.config, replayed.saved)
        if replayed.winding_down:
            self._membership.wind_down()
        self._arrivals.hellos = replayed.started
        self._workers.draining_nodes.update(replayed.draining_nodes)
        faults.count_as_fired(replayed.fired)
        self._receipts.replay(replayed.committed)
        self._last_words.replay(happened)
        self._replacements.replay(replayed.replacements)
        self._remedies.replay(happened)
        self._preflight.replay(happened)
        self._membership.skips += replayed.skips
        self._corruption.replay(happened)
        _once_answered(lambda: self._training.replay(replayed))
        if self._standstill is not None:
            steps = self.config.paths.steps
            latest = _once_answered(lambda: recent_steps(steps, replayed.recorded, STEPS))
            self._standstill.replay(latest)
        for event in happened:
            self._save_wish.hear(event)
        if replayed.going_back is not None:
            self._give_up_after(replayed.going_back)
        else:
            # The commit of a save that a restore has made void may have come through late: it would
            # be in the way of its step, and be gone on from once the run is that far.
            self._give_up_after(replayed.recorded, only_own=True)
        _once_answered(lambda: self._pulses.replay(happened))
        snapshots = self._snapshots if self.config.in_memory else None
        return Failover(
            replayed,
            self._membership,
            self._dispatcher,
            self._workers,
            self._arrivals,
            snapshots,
            FIRST_START_S,
            LOCKED_TIMES * self.config.health.freeze_timeout_s,
            lambda nodes: self._replacements.not_lost(
                nodes, max(replayed.newest_s, self.config.started.time)
            ),
            partial(self._go_on, replayed.troubles),
        )

    def _give_up_after(self, step: int, *, only_own: bool = False) -> None:
        """What a coordinator before this one had no time for. If it raised, this one would end."""
        try:
            _once_answered(lambda: self._retreat.give_up_after(step, only_own=only_own))
        except CheckpointError as error:
            self._membership.stop(f"Later checkpoints cannot be set aside: {error}")

    def _go_on(self, troubles: Sequence[events.TrainingTrouble]) -> None:
        """The run is known to a coordinator that was started anew."""
        self._watch_steps()
        self._training.take_up(troubles)

    def _watch_steps(self) -> None:
        """From now on a step is due: a roster has been decided, or stands as it did."""
        if self._standstill is not None:
            self._standstill.begin()

    def _carry_on(self, effects: Effects) -> None:
        """What follows from a decision for others than those who wait."""
        regrouped = effects.regrouped
        if regrouped is not None and regrouped.outcome in ("start", "restore"):
            given_up = regrouped.step, regrouped.roster.generation
            self._snapshots.went_back(*given_up)
            self._dispatcher.spawn(self._snapshots.sweep_given_up(*given_up))
        if regrouped is not None:
            self._watch_steps()
            self._dispatcher.spawn(self._sweep(regrouped.roster.generation - 1))
        if effects.signals:
            self._dispatcher.spawn(self._workers.lose_laggards(effects.signals))

    async def _empty(self, node: str) -> None:
        """Waits until all is brought away that goes with a node's machine."""
        await self._uploaders.finish(node)
        await self._last_words.keep_output(node)

    async def _sweep(self, generation: int) -> None:
        """Deletes what groups older than `generation`, and of replicas that are gone, have left in
        the store."""
        formations = self._membership.formations
        past = Past(generation=generation, begun=formations.begun, present=formations.present)
        try:
            await asyncio.to_thread(sweep_store, self._store, past)
        except RuntimeError as error:  # it costs memory, and no more
            log.warning("the store was not swept: %s", error)

    @property
    def _failing_over(self) -> Failover | None:
        """While a coordinator that was started anew does not know the run yet."""
        return None if self._dispatcher.ready.is_set() else self._failover

    async def known(self) -> None:
        """Waits until a coordinator that was started anew knows the run, and sees to it that it
        will."""
        if (failover := self._failing_over) is not None:
            failover.begin()
            await self._dispatcher.ready.wait()

    async def durable(self) -> None:
        """Waits until all that was written down outlives this machine. See `RunLog.durable`."""
        going_on = self._membership.stopped is None
        await self._records.durable()
        if going_on and self._membership.stopped is not None:  # it could not be written down
            await self._dispatcher.advance()

    # -- workers -----------------------------------------------------------------------------------

    async def hello(self, identity: Identity) -> None:
        self._replacements.begin()
        failover = self._failing_over
        if failover is not None and failover.awaits(identity.worker):
            await failover.hear(Standing(identity=identity))  # its hello was not answered
            return
        await self.known()
        await self._arrivals.hello(identity)
        await self.durable()

    async def resume(self, standing: Standing) -> None:
        self._replacements.begin()
        if (failover := self._failing_over) is not None:
            await failover.hear(standing)
        elif self._failover is None and standing.generation > self._membership.progress.generation:
            paths = self.config.paths
            await self._dispatcher.stop(
                f"the coordinator, started anew, found nothing of this start of the run in "
                f"{paths.events}, and {standing.identity.worker} is in roster "
                f"{standing.generation} of it: is that file damaged or gone? What the workers held "
                f"is lost; run the same name again to go on from the newest checkpoint"
            )
        elif standing.identity.worker not in self._workers.started:  # it was written off
            self._dispatcher.turn_away(standing.identity.worker)

    @_when_known
    async def join(self, report: Report) -> Answer:
        await self._workers.until_watched(report.identity.worker)
        await self._arrivals.joined(report.identity.worker)
        await self._preflight.until_checked(report)
        if report.recent:
            self._take_steps(report.recent)
        self._arrivals.put_off_start()
        return await self._dispatcher.join(report)

    async def watch(self, worker: str, seen: int) -> Signal | None:
        failover = self._failing_over
        if failover is not None and not failover.has_heard(worker):
            raise UnheardError
        return await self._dispatcher.watch(worker, seen)

    @_when_known
    async def built(self, worker: str, formed: int) -> None:
        self._membership.built(worker, formed)
        await self._dispatcher.advance()

    @_when_known
    async def trouble(
        self, worker: str, step: int | None, detail: str, cause: Cause, formed: int | None
    ) -> str:
        return await self._troubles.settle(worker, step, detail, cause, formed)

    @_when_known
    async def fail(
        self,
        error: str,
        worker: str | None = None,
        cause: Cause | None = None,
        generation: int | None = None,
    ) -> None:
        membership = self._membership
        given_up = generation is not None and (
            generation != membership.roster.generation or self._retreat.under_way
        )
        if worker is None or (worker in membership.members and not given_up):
            await self._dispatcher.stop(error, cause)

    @_when_known
    async def record(
        self, steps: list[events.StepRecord], happened: list[events.Event]
    ) -> Recorded:
        self._take_steps(steps, happened)
        if self._membership.stopped is not None:
            await self._dispatcher.advance()
        return Recorded(
            steps=self._membership.progress.recorded,
            save_wanted=self._save_wish.wanted(),
        )

    def _take_steps(
        self, steps: Sequence[events.StepRecord], happened: Sequence[events.Event] = ()
    ) -> None:
        """With what a worker tells of the steps. Who came to other gradients than before is seen
        first, as a comparison confirms what was done again; what is found of the training stands
        after what is told of it."""
        taken = self._records.take_steps(steps)
        self._pulses.take_steps(taken)
        self._corruption.take(taken)
        if self._standstill is not None and taken:
            self._standstill.committed(taken)
        self._injections.hit_spares()
        self._records.take_events(happened)
        self._training.take(taken)

    @_when_known
    async def claim_fault(self, index: int, slot: int, step: int, worker: str) -> bool:
        return await self._injections.claim(index, slot, step, worker)

    @_when_known
    async def caught_up(
        self, worker: str, generation: int, size: int, seconds: float, steps: int
    ) -> None:
        await self._heal_news.caught_up(worker, generation, size, seconds, steps)

    @_when_known
    async def heal_failed(self, worker: str, generation: int, reason: str) -> None:
        await self._heal_news.failed(worker, generation, reason)

    @_when_known
    async def cross_lost(self, worker: str, generation: int, reason: str) -> None:
        await self._cross_failures.take(generation, reason, worker)

    @_when_known
    async def links_tested(self, worker: str, test: LinkTest) -> None:
        await self._link_tests.take(worker, test)

    @_when_known
    async def compare(self, worker: str, generation: int, slot: str, digest: str) -> None:
        if self._membership.progress.going_back:
            return
        if not self._records.compare(worker, generation, slot, digest):
            await self._dispatcher.stop(
                f"replicas differ at the end of the run in {slot}: this is a bug"
            )

    @_when_known
    async def corrupt(self, worker: str, generation: int, detail: str, spread: bool) -> None:
        await self._corruption.outlier(worker, generation, detail, spread=spread)

    @_when_known
    async def spread(self, generation: int, detail: str) -> None:
        await self._corruption.spread(generation, detail)

    @_when_known
    async def undecided(self, generation: int, step: int, detail: str) -> None:
        await self._corruption.undecided(generation, step, detail)

    # -- saves -------------------------------------------------------------------------------------

    async def uploader(self, node: str) -> Remote[UploaderApi]:
        return self._uploaders.of(node)

    @_when_known
    async def receipt(
        self, receipt: Receipt, training_state: dict[str, Any], started: float, writers: int
    ) -> None:
        await self._receipts.take(receipt, training_state, started, writers)

    @_when_known
    async def save_failed(self, step: int, generation: int, reason: str) -> None:
        await self._receipts.failed(step, generation, reason)

    async def saved(self, step: int) -> bool:
        return self._receipts.saved(step)

    async def newest_saved(self) -> tuple[int, int] | None:
        return await self._receipts.newest()

    @_when_known
    async def checkpoint_failed(
        self, worker: str, step: int, generation: int, error: CheckpointError
    ) -> None:
        await self._restores.failed(worker, step, generation, error)

    @_when_known
    async def snapshot_part(
        self,
        receipt: Receipt,
        training_state: dict[str, Any],
        node: str,
        started: float,
        writers: int,
    ) -> None:
        await self._snapshots.take(receipt, training_state, node, started, writers)

    @_when_known
    async def snapshot_skipped(self, step: int, generation: int, reason: str) -> None:
        await self._snapshots.skipped(step, generation, reason)

    @_when_known
    async def snapshot(self, step: int) -> HeldSnapshot | None:
        return self._snapshots.find(step)

    @_when_known
    async def snapshot_failed(self, step: int, generation: int, reason: str) -> None:
        await self._snapshots.failed(step, generation, reason)

    # -- machines ----------------------------------------------------------------------------------

    async def beat(self, node: str, token: str, deaths: list[Death]) -> bool:
        if not self._agents.renew(token):
            return False
        if deaths:
            self._last_words.expect_of_frozen(deaths)
            # It may wait, and the agent's beats must not.
            self._dispatcher.spawn(self._workers.lose_all(deaths))
        return True

    async def helper_started(self, node: str, helper: Helper) -> None:
        self._agents.watch_helper(node, helper)

    async def helper_killed(self, node: str, helper: str, detail: str) -> None:
        self._records.note(
            events.HelperKilled(time=time.time(), node=node, helper=helper, detail=detail)
        )

    async def signs_changed(self, node: str, names: list[str], signs: list[Sign]) -> None:
        found = [sign.to_json() for sign in signs]
        self._records.note(
            events.SignsChanged(time=time.time(), node=node, names=names, signs=found)
        )

    @_when_known
    async def node_checking(self, node: str, check: str, number: int, total: int) -> None:
        self._records.note(
            events.NodeChecking(
                time=time.time(), node=node, check=check, number=number, total=total
            )
        )
        self._arrivals.put_off_start()  # its workers are here, and come

    @_when_known
    async def node_checked(self, node: str, findings: list[Finding]) -> None:
        await self._preflight.take(node, findings)

    @_when_known
    async def drain(self, node: str, deadline: float | None, reason: str) -> None:
        left_s = None if deadline is None else deadline - time.time()
        if node not in self._workers.draining_nodes:  # nor is it being replaced
            self._last_words.keep_announced(node, self._workers.work_on)
        await self._workers.drain_node(node, left_s, reason)

    @_when_known
    async def drain_worker(self, worker: str, reason: str) -> None:
        await self._workers.drain([worker], reason, None, None)

    # -- the supervisor and the driver -------------------------------------------------------------

    @_when_known
    async def expect(self, workers: int) -> None:
        self._membership.formations.expect(workers)

    async def hellos(self) -> int:
        return self._arrivals.hellos

    async def silent(self, workers: list[tuple[str, int]]) -> list[tuple[str, int]] | None:
        if not self._dispatcher.ready.is_set():
            return None
        there = self._workers.processes
        return [one for one in workers if one not in there]

    @_when_known
    async def ended_silent(self, workers: list[tuple[str, int]], silent_s: float) -> None:
        self._workers.lose_silent(workers, silent_s)

    async def ended(self, workers: list[tuple[str, int]]) -> list[float | None]:
        there_s = self._workers.there_s(workers, time.monotonic())  # what follows may take long
        if (failover := self._failing_over) is not None:
            failover.begin()
        await self._workers.lose_unwatched(workers)
        await self.durable()
        return there_s

    @_when_known
    async def wind_down(self, reason: str) -> None:
        self._note_stop(reason)
        await self._dispatcher.advance()

    async def awake(self) -> None:
        self._pulses.begin()  # workers may be waited for for long
        self._supervised.renew()

    async def verdict(self) -> Stop | None:
        return self._membership.stopped

    async def over(self) -> None:
        await self._dispatcher.until(lambda: self._membership.stopped is not None)

    async def end(self, outcome: events.RunOutcome, error: str | None) -> None:
        await self._last_words.finish()
        await self._pulses.finish()
        await await_closed(self._records.end(outcome, error))


def _find_records(config: CoordinatorConfig) -> list[events.Event]:
    """The events of all starts of the run, for a coordinator that is started anew. In a directory
    that is not this run's it would take itself for the run's first, whose workers begin from the
    seed. A damaged line is passed over: the workers know what is missing, and the run is well.

    Raises:
        OSError: it is not this run's, or does not answer.
    """
    paths = config.paths
    if recorded_identity(paths) != config.identity:
        raise FileNotFoundError(
            f"{paths.identity} is not there, or another run's: is {paths.root} mounted on this "
            f"machine?"
        )
    return events_to_go_on_from(paths.events, time.time() - AGAIN_S)  # what `Remedies` looks at


def _as_stored(config: CoordinatorConfig, replayed: Replay) -> CoordinatorConfig:
    """The run's config for a coordinator that is started anew, in the middle of it. A checkpoint is
    committed when its steps are in the records: one of a later step was brought here, as by an
    import, or is of before the run went back."""

    def is_later(manifest: Manifest) -> bool:
        return manifest.step > replayed.recorded

    find = partial(newest_own, config.paths, config.identity, is_given_up=is_later)
    stored, _ = _once_answered(find)
    return replace(config, restore_step=0 if stored is None else stored.step, snapshot=None)


def _describe_missing(config: CoordinatorConfig, step: int) -> str:
    paths = config.paths
    return (
        f"all copies of the state are lost. The run had the state of step {step} saved, by "
        f"{paths.events}, and its coordinator, started anew, found no checkpoint of its own that "
        f"can be read in {paths.checkpoints}: is that mounted where Ray started it? Bring the "
        f"checkpoints back and run the same name again, or start from the seed under another "
        f"run_config.name"
    )


def _once_answered(ask: Callable[[], _Reply]) -> _Reply:
    """What the storage does for a coordinator that is started anew. No step waits for that, so one
    that does not answer is asked until it does."""
    while True:
        try:
            return ask()
        except (StoreUnavailableError, OSError) as error:
            log.warning("a coordinator started anew waits for the run's storage: %s", error)
            time.sleep(_STORAGE_RETRY_S)
