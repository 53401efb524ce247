"""A worker's line to the coordinator. Implements the loop's `Link` without a call on the step path.

A thread waits in `watch` for calls and leaves their numbers in plain attributes, which the loop
reads. What is reported goes through the outbox, the state through saves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import ObjectRef

from elastic.protocol import events
from elastic.protocol.causes import Cause
from elastic.protocol.coordinator_api import CoordinatorApi, UnheardError
from elastic.protocol.job import Job
from elastic.protocol.messages import (
    Answer,
    Build,
    Identity,
    Leave,
    LinkTest,
    Report,
    Run,
    Signal,
    Standing,
    shows_recent,
)
from elastic.protocol.rpc import RETRY_S, until_answered
from elastic.worker.disputes import Disputes
from elastic.worker.fault_injection import Injection
from elastic.worker.outbox import Outbox
from elastic.worker.save_schedule import SaveSchedule
from elastic.worker.saver import Saver
from health.heartbeat import NO_PHASE, NO_STEP, Heartbeat
from health.pace import PaceWindow
from trainer.backend.groups import abort_groups, replica_connections
from trainer.engine.engine import Engine
from trainer.loop.clock import OwnTimes, StepTimes
from trainer.loop.device_time import DeviceTime
from trainer.loop.phases import PHASES, Phase
from trainer.loop.profiling import Profile
from trainer.recovery.heal import Newcomer
from trainer.replication.step_commit import Commit, Place, Saving

log = logging.getLogger(__name__)

_PHASE_NUMBERS: dict[str, int] = {phase: number for number, phase in enumerate(PHASES)}
ORPHAN_EXIT_CODE = 72
"""Of a worker whose coordinator is gone for good."""


class CoordinatorLink:
    """What the loop tells goes out by threads; what it asks lies in plain attributes.

    Args:
        identity: who this worker is.
        job: what the run is about.
        heartbeat: shows what this worker does.
    """

    def __init__(self, identity: Identity, job: Job, heartbeat: Heartbeat) -> None:
        self._identity, self._job, self._heartbeat = identity, job, heartbeat
        self._coordinator = job.coordinator
        self._called = {"fault": 0, "boundary": 0}
        self._settled = 0
        self._run: Run | None = None
        self._standing = Standing(identity=identity)
        self._news: list[Callable[[], ObjectRef[None]]] = []
        """Each sends what this worker has told of its part in the roster: once more to another
        coordinator."""
        self._save_schedule = SaveSchedule(job.checkpoint)
        self.outbox = Outbox(job.coordinator, lambda wanted: self.saves.ask(wanted))
        self.saves = Saver(job, identity, self.outbox, self._save_schedule, self.leave_now)
        self.injection = Injection(job, identity.worker)
        self._paces = PaceWindow()
        self._disputes = Disputes(identity.worker, job.coordinator, self.outbox)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    # -- membership --------------------------------------------------------------------------------

    def join(self, report: Report) -> Answer:
        """Waits in the coordinator for what to do next."""
        step = NO_STEP if report.step is None else report.step
        self._heartbeat.leave()
        self.mark(step, "wait")
        self._standing = self._standing.joining(report)
        recent = self.outbox.recent()
        if shows_recent(self._run, report.built):
            report = replace(report, recent=recent)
        answer = self._coordinator.call(CoordinatorApi.join, report)
        # First of all: the next coordinator may be asking where this worker stands.
        self._take_on(answer)
        self._settled = getattr(answer, "serial", self._settled)
        self.outbox.settle(answer)
        kinds = {Build: "build", Run: "regroup", Leave: "regroup"}
        self.mark(step, kinds.get(type(answer), "shutdown"))
        return answer

    def _take_on(self, answer: Answer) -> None:
        self._run = answer if isinstance(answer, Run) else None
        self._standing = self._standing.after(answer)
        if isinstance(answer, Build | Run):
            workers = self._job.train.parallel.workers
            self.injection.slot = answer.replica * workers + answer.rank
        if isinstance(answer, Run):
            self._news = []

    def trouble(
        self, step: int | None, detail: str, cause: Cause, formed: int | None = None
    ) -> bool:
        """Reports an exception, where `formed` is given in the building of that formation. Returns
        whether it was only the loss of a peer."""
        worker = self._identity.worker
        call, trouble = self._coordinator.call, CoordinatorApi.trouble
        return call(trouble, worker, step, detail, cause, formed) == "peer"

    def built(self, formed: int) -> None:
        """This worker has built its part of a formation beside the steps."""
        worker = self._identity.worker
        self._tell(lambda: self._coordinator.send(CoordinatorApi.built, worker, formed))

    def builds_beside(self, goes_on: bool) -> None:
        """The heartbeat shows whether a build goes on beside the steps. Called by its thread."""
        self._heartbeat.build_beside(goes_on)

    def fail(self, error: str, cause: Cause, generation: int | None) -> None:
        """Ends the whole run, for what came in roster `generation`; see `CoordinatorApi.fail`."""
        self.outbox.flush()
        worker = self._identity.worker
        self._coordinator.call(CoordinatorApi.fail, error, worker, cause, generation)

    def terminating(self) -> None:
        """This process was sent SIGTERM: it will be killed soon."""
        self._coordinator.call(CoordinatorApi.drain_worker, self._identity.worker, "SIGTERM")

    def compare(self, slot: str, digest: str) -> None:
        """Hands in this worker's state digest at the end of the run."""
        assert self._run is not None
        worker, generation = self._identity.worker, self._run.generation

        def send() -> ObjectRef[None]:
            compare = CoordinatorApi.compare
            return self._coordinator.send(compare, worker, generation, slot, digest)

        self._news.append(send)
        until_answered(send)

    # -- Link: read by the loop --------------------------------------------------------------------

    def leave_now(self) -> bool:
        """See Link."""
        return self._called["fault"] > self._settled

    def leave_at_boundary(self) -> bool:
        """See Link."""
        return self._called["boundary"] > self._settled

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        self.mark(step, phase)
        if self._job.faults:
            self.injection.enter(step, phase)

    def mark(self, step: int, phase: str) -> None:
        """The heartbeat shows a phase that no fault is placed in. Called by the thread that
        trains."""
        self._heartbeat.mark(step, _PHASE_NUMBERS.get(phase, NO_PHASE))

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""
        now, run = time.time(), self._run
        assert run is not None
        if not self._standing.proven:
            self._standing = replace(self._standing, proven=True)
        self.outbox.step(
            events.StepRecord(
                step=commit.step,
                loss=commit.loss,
                grad_norm=commit.grad_norm,
                lr=lr,
                tokens=commit.tokens,
                time=now,
                generation=run.generation,
                replicas=len(run.lanes),
                sample_digests=commit.sample_digests,
                gradients=commit.gradients,
            )
        )
        self.outbox.let_go(commit.recorded)
        if not applied and run.lead:
            self.outbox.event(
                events.StepSkipped(
                    time=now, step=commit.step, loss=commit.loss, grad_norm=commit.grad_norm
                )
            )

    def timed(self, times: StepTimes) -> None:
        """See Link."""
        if self._run is not None and self._run.lead:
            self.outbox.event(
                events.StepsTimed(
                    time=time.time(),
                    step=times.step,
                    steps=times.steps,
                    seconds={str(part): seconds for part, seconds in times.seconds.items()},
                )
            )

    def worked(self, own: OwnTimes) -> None:
        """See Link."""
        if (pace := self._paces.add(**vars(own))) is not None:
            self._heartbeat.show(pace)

    def profiled(self, profile: Profile) -> None:
        """The profile of this worker's steps has ended."""
        self.outbox.event(
            events.Profiled(
                time=time.time(),
                worker=self._identity.worker,
                node=self._identity.node,
                first=profile.first,
                last=profile.last,
                file=profile.file,
                problem=profile.problem,
                operators=[asdict(operator) for operator in profile.operators],
                attention=list(profile.attention),
                device_ms=_device_ms(profile.device),
            )
        )

    def caught_up(self, newcomer: Newcomer) -> None:
        """See Link."""
        assert self._run is not None
        self._standing = replace(self._standing, behind=False)
        seconds = time.monotonic() - newcomer.started_at
        about = self._identity.worker, self._run.generation
        size, steps = newcomer.bytes, newcomer.steps_behind
        self._tell(
            lambda: self._coordinator.send(CoordinatorApi.caught_up, *about, size, seconds, steps)
        )

    def heal_failed(self, reason: str) -> None:
        """See Link."""
        assert self._run is not None
        about = self._identity.worker, self._run.generation
        self._tell(lambda: self._coordinator.send(CoordinatorApi.heal_failed, *about, reason))

    def cross_lost(self, reason: str) -> None:
        """The group across replicas has failed, and nobody has announced a fault."""
        assert self._run is not None
        worker, generation = self._identity.worker, self._run.generation
        self._tell(
            lambda: self._coordinator.send(CoordinatorApi.cross_lost, worker, generation, reason)
        )

    def links_tested(self, test: LinkTest) -> None:
        """This worker has tried its connections to the others of its cross group."""
        worker = self._identity.worker
        self._tell(lambda: self._coordinator.send(CoordinatorApi.links_tested, worker, test))

    def _tell(self, send: Callable[[], ObjectRef[None]]) -> None:
        self._news.append(send)
        send()

    def compared(self, step: int, checksums: list[int | None], confirmed: bool) -> None:
        """See Link."""
        assert self._run is not None
        self._disputes.compared(self._run, step, checksums, confirmed)

    def witnessed(self, step: int, digests: Mapping[int, int]) -> bool:
        """See Link."""
        assert self._run is not None
        return self._disputes.witnessed(self._run, step, digests)

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        """See Link."""
        if self._run is not None and self._run.lead:
            self.outbox.event(
                events.Evaluated(time=time.time(), step=step, val_loss=loss, tokens=tokens)
            )

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        """See Link."""
        run = self._run
        assert run is not None
        if step >= run.until:
            self.mark(step, "wait")  # an upload may take long, and its peers wait for it meanwhile
            lacking = self.saves.lacks_last(step)
            self.mark(step, "checkpoint")
            if not lacking:
                return
        self.saves.save(run, step, engine, training_state, places)

    def saving(self) -> Saving:
        """See Link."""
        assert self._run is not None
        return self.saves.saving(lead=self._run.lead)

    def recorded(self) -> int:
        """See Link."""
        return self.outbox.recorded

    def save_skipped(self, step: int, places: Sequence[Place]) -> None:
        """See Link."""
        if self._run is None or not self._run.lead:
            return
        skipped = {"store": events.CheckpointSkipped, "memory": events.SnapshotSkipped}
        for place in places:
            reason = "the one before it is still being written"
            self.outbox.event(skipped[place](time=time.time(), step=step, reason=reason))

    def close(self) -> None:
        """Ends the threads."""
        self._closed.set()
        self.outbox.close()

    # -- threads -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen = 0
        while not self._closed.is_set():
            try:
                call = ray.get(self._next_call(seen))
            except (ray.exceptions.ActorUnavailableError, UnheardError):
                self._reintroduce()
                continue
            except ray.exceptions.ActorDiedError:
                if not self._closed.is_set():  # ended by hand: nobody ends this process, either
                    os._exit(ORPHAN_EXIT_CODE)
                return
            except ray.exceptions.RayError as error:
                log.warning("calls are asked for again: %s", error)
                self._closed.wait(RETRY_S)
                continue
            if call is None:
                return
            seen, replica = call.serial, replica_connections()
            self._called[call.kind] = call.serial
            if call.kind == "fault":
                self._save_schedule.failed()
                if call.serial > self._settled:  # else it is of the groups before
                    abort_groups(replica=replica if call.broken else None)

    def _next_call(self, seen: int) -> ObjectRef[Signal | None]:
        return self._coordinator.send(CoordinatorApi.watch, self._identity.worker, seen)

    def _reintroduce(self) -> None:
        """The coordinator was lost: tells the one that is started in its place what it must
        know."""
        try:
            until_answered(self._resume)
        except ray.exceptions.RayError:
            return
        threading.Thread(target=self._tell_again, name="tell-again", daemon=True).start()

    def _resume(self) -> ObjectRef[None]:
        """Where this worker stands may change until somebody is there to hear it."""
        standing = replace(self._standing, serial=max(self._settled, *self._called.values()))
        return self._coordinator.send(CoordinatorApi.resume, standing)

    def _tell_again(self) -> None:
        """Repeats what the coordinator that was lost may not have heard, or have told nobody."""
        with contextlib.suppress(ray.exceptions.RayError):
            for send in tuple(self._news):
                until_answered(send)
            if self.saves.hand_in_again is not None:
                self.saves.hand_in_again()


def _device_ms(device: DeviceTime | None) -> dict[str, float]:
    return {
        name.removesuffix("_ms"): round(each, 3)
        for name, each in (asdict(device) if device is not None else {}).items()
    }
