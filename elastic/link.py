"""A worker's line to the coordinator. Implements the loop's `Link` without a call on the step path.

Two threads do the talking: one waits in `watch` for calls and leaves their numbers in plain
attributes, which the loop reads; one sends step records. A checkpoint is copied on the worker's own
thread and written by another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from checkpointing import (
    Keys,
    Manifest,
    NotCommittedError,
    RangeSource,
    Store,
    check_room,
    open_memory,
    open_store,
    write_slices,
)
from elastic import events
from elastic.ask import ask, until_answered
from elastic.faults import InjectedError, flip_bit
from elastic.job import Job
from elastic.messages import Answer, Build, Identity, Report, Run, Standing
from elastic.snapshot_holder import HeldSegments
from health.corruption import compare_checksums
from health.heartbeat import NO_PHASE, NO_STEP, Heartbeat
from trainer.backend.groups import abort_replica_group
from trainer.commit import Commit
from trainer.engine import Engine
from trainer.heal import Newcomer
from trainer.link import Place
from trainer.phases import PHASES, Phase

log = logging.getLogger(__name__)

_PHASE_NUMBERS: dict[str, int] = {phase: number for number, phase in enumerate(PHASES)}
_MASK = 0xFFFFFFFFFFFFFFFF
_REPORT_INTERVAL_S = 0.2
CORRUPT_EXIT_CODE = 71

_NO_NEWS: tuple[Any, tuple[Any, ...]] = (None, ())
"""(method of the coordinator, arguments)."""
_RECORDS_KEPT = 10_000
_RECENT_MOST = 500
"""Steps that a worker shows when it joins: more than the lead can have failed to send."""


class CoordinatorLink:
    """See the module.

    Args:
        coordinator: the run's coordinator actor.
        identity: who this worker is.
        job: what the run is about.
        heartbeat: shows what this worker does.
    """

    def __init__(
        self, coordinator: Any, identity: Identity, job: Job, heartbeat: Heartbeat
    ) -> None:
        self._coordinator, self._identity, self._job = coordinator, identity, job
        self._heartbeat = heartbeat
        self._called = {"fault": 0, "boundary": 0}
        self._settled = 0
        self._run: Run | None = None
        self._slot: int | None = None
        self.engine: Engine | None = None
        """What an injected fault may disturb."""
        self._records: deque[events.StepRecord] = deque(maxlen=_RECORDS_KEPT)
        self._events: deque[events.Event] = deque()
        self._sending = threading.Lock()
        self._writers: dict[Place, threading.Thread] = {}
        self._receipt = _NO_NEWS
        """The latest for the store."""
        self._standing = Standing(identity=identity)
        self._heal_news = _NO_NEWS
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        threading.Thread(target=self._report, name="report", daemon=True).start()

    # -- membership --------------------------------------------------------------------------------

    def join(self, report: Report) -> Answer:
        """Waits in the coordinator for what to do next."""
        step = NO_STEP if report.step is None else report.step
        self._mark(step, "wait")
        if not report.built:
            self._standing = Standing(identity=self._identity)
        with self._sending:  # what is being sent has arrived, and what is left is shown
            report = self._with_recent(report)
        answer: Answer = ask(self._coordinator.join, report)
        with self._sending:
            self._take_on(answer)
        kinds = {Build: "build", Run: "regroup"}
        self._mark(step, kinds.get(type(answer), "shutdown"))
        self._settled = getattr(answer, "serial", self._settled)
        return answer

    def _take_on(self, answer: Answer) -> None:
        self._run = answer if isinstance(answer, Run) else None
        self._standing = _standing_after(self._standing, answer)
        if isinstance(answer, Build | Run):
            self._slot = answer.replica * self._job.train.parallel.workers + answer.rank
        if isinstance(answer, Run):
            self._heal_news = _NO_NEWS
            while self._records and self._records[0].step < answer.recorded:
                self._records.popleft()
            if answer.restore:
                self._records.clear()

    def trouble(self, step: int | None, detail: str, *, of_a_group: bool) -> bool:
        """Reports an exception. Returns whether it was only the loss of a peer, of which one from a
        process group is a sign."""
        worker = self._identity.worker
        return ask(self._coordinator.trouble, worker, step, detail, of_a_group) == "peer"

    def fail(self, error: str) -> None:
        """Ends the whole run."""
        self.flush()
        ask(self._coordinator.fail, error)

    def terminating(self) -> None:
        """This process was sent SIGTERM: it will be killed soon."""
        ask(self._coordinator.drain_worker, self._identity.worker, "SIGTERM")

    def compare(self, slot: str, digest: str) -> None:
        """Hands in this worker's state digest at the end of the run."""
        ask(self._coordinator.compare, slot, digest)

    # -- Link: read by the loop --------------------------------------------------------------------

    def leave_now(self) -> bool:
        """See Link."""
        return self._called["fault"] > self._settled

    def leave_at_boundary(self) -> bool:
        """See Link."""
        return self._called["boundary"] > self._settled

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        self._mark(step, phase)
        if self._job.faults and self._slot is not None:
            for index, fault in enumerate(self._job.faults):
                if fault.due(step, phase) and self._slot in fault.targets(self._job.slots):
                    self._fire(index, step)

    def _mark(self, step: int, phase: str) -> None:
        self._heartbeat.mark(step, _PHASE_NUMBERS.get(phase, NO_PHASE))

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""
        now, run = time.time(), self._run
        assert run is not None
        if not self._standing.proven:
            self._standing = replace(self._standing, proven=True)
        self._records.append(
            events.StepRecord(
                step=commit.step,
                loss=commit.loss,
                grad_norm=commit.grad_norm,
                lr=lr,
                tokens=commit.tokens,
                time=now,
                generation=run.generation,
                replicas=len(run.lanes),
                sample_digests=list(commit.digests),
            )
        )
        if not applied and run.lead:
            self.event(
                events.StepSkipped(
                    time=now, step=commit.step, loss=commit.loss, grad_norm=commit.grad_norm
                )
            )

    def caught_up(self, newcomer: Newcomer) -> None:
        """See Link."""
        self._standing = replace(self._standing, behind=False)
        seconds = time.monotonic() - newcomer.started_at
        news = self._identity.worker, newcomer.bytes, seconds, newcomer.steps_behind
        self._heal_news = self._coordinator.caught_up, news
        self._coordinator.caught_up.remote(*news)

    def heal_failed(self, reason: str) -> None:
        """See Link."""
        self._heal_news = self._coordinator.heal_failed, (self._identity.worker, reason)
        self._coordinator.heal_failed.remote(self._identity.worker, reason)

    def compared(self, step: int, checksums: list[int | None]) -> None:
        """See Link. A worker that differs from most leaves; its replica heals from another one."""
        assert self._run is not None
        found, worker = compare_checksums(checksums), self._identity.worker
        shown = ", ".join("-" if c is None else f"{c & _MASK:016x}" for c in checksums)
        if self._run.lead:
            self.event(events.ReplicasCompared(time=time.time(), step=step, equal=found.equal))
        if self._run.position in found.outliers:
            detail = f"its state before step {step} differs from most replicas': {shown}"
            self.flush()
            ask(self._coordinator.corrupt, worker, detail)
            os._exit(CORRUPT_EXIT_CODE)
        if not found.decided and self._run.position == 0:
            self.fail(
                f"the replicas differ before step {step}, and no majority shows which is right: "
                f"checksums {shown}. They were equal {self._job.health.compare_every} steps before "
                f"(health.compare_every): delete the checkpoints since then, and run the same name "
                f"again"
            )

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        """See Link."""
        if self._run is not None and self._run.lead:
            self.event(events.Evaluated(time=time.time(), step=step, val_loss=loss, tokens=tokens))

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        """See Link. A save that comes while the last one of its kind is being written is skipped,
        except at the end."""
        assert self._run is not None
        if step >= self._job.train.steps:
            self.wait_for_writers()
            if ask(self._coordinator.saved, step):
                return
        else:
            places = self._idle_writers(engine, step, places)
        if not places:
            return
        slices, started = engine.state.to_save(), time.time()
        for place in places:
            self._writers[place] = threading.Thread(
                target=self._write,
                args=(place, step, self._run.generation, engine.rank),
                kwargs={"slices": slices, "training_state": training_state, "started": started},
                name=f"save to {place}",
                daemon=True,
            )
            self._writers[place].start()

    def snapshot(self, step: int) -> tuple[RangeSource, Manifest]:
        """The snapshot of `step` in the nodes' memory.

        Raises:
            NotCommittedError: it is not to be had any more.
        """
        held = ask(self._coordinator.snapshot, step)
        if held is None:
            raise NotCommittedError(step, "the nodes that held the snapshot are gone")
        segments = HeldSegments(held, self._job.paths.memory, self._identity.node)
        return segments, held.manifest

    def snapshot_failed(self, step: int, reason: str) -> None:
        """Reports that the snapshot of `step` cannot be read: from now on it does not count."""
        ask(self._coordinator.snapshot_failed, step, reason)

    def _with_recent(self, report: Report) -> Report:
        """Adds the latest steps; one worker of a replica does it for all."""
        if self._run is None or self._run.rank > 0:
            return report
        return replace(report, recent=tuple(self._records)[-_RECENT_MOST:])

    def _idle_writers(self, engine: Engine, step: int, places: Sequence[Place]) -> list[Place]:
        """The places where no worker of the replica is busy with an earlier save; all skip the
        others."""
        assert self._run is not None
        busy = [float(p in self._writers and self._writers[p].is_alive()) for p in places]
        counts = dict(zip(places, engine.sum_in_replica(busy), strict=True))
        skipped = {"store": events.CheckpointSkipped, "memory": events.SnapshotSkipped}
        for place in places:
            if counts[place] and self._run.lead:
                reason = "the one before it is still being written"
                self.event(skipped[place](time=time.time(), step=step, reason=reason))
        return [place for place in places if not counts[place]]

    # -- records -----------------------------------------------------------------------------------

    def event(self, event: events.Event) -> None:
        """Queues an event for the run's records."""
        self._events.append(event)

    def flush(self) -> None:
        """Sends what is queued, and waits until the coordinator has it."""
        with self._sending:
            lead = self._run is not None and self._run.lead
            steps = list(self._records) if lead else []
            happened = list(self._events)
            if steps or happened:
                ask(self._coordinator.record, steps, happened)
            for queue, sent in ((self._records, steps), (self._events, happened)):
                for _ in sent:
                    queue.popleft()

    def wait_for_writers(self) -> None:
        """Waits until whatever is being written is written."""
        for writer in self._writers.values():
            writer.join()

    def close(self) -> None:
        """Ends the threads."""
        self._closed.set()

    # -- threads -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen = 0
        while not self._closed.is_set():
            try:
                call = ray.get(self._coordinator.watch.remote(self._identity.worker, seen))
            except ray.exceptions.ActorUnavailableError:
                self._reintroduce()
                continue
            except ray.exceptions.RayError:
                return
            if call is None:
                return
            seen = call.serial
            self._called[call.kind] = call.serial
            if call.broken:
                abort_replica_group()

    def _reintroduce(self) -> None:
        """The coordinator was lost: tells the one that is started in its place what it must
        know."""
        try:
            until_answered(lambda: self._coordinator.resume.remote(self._stands_now()))
        except ray.exceptions.RayError:
            return
        threading.Thread(target=self._tell_again, name="tell-again", daemon=True).start()

    def _stands_now(self) -> Standing:
        """It may change until somebody is there to hear it."""
        return replace(self._standing, serial=max(self._settled, *self._called.values()))

    def _tell_again(self) -> None:
        """Repeats what the coordinator that was lost may not have heard, or have told nobody."""
        with contextlib.suppress(ray.exceptions.RayError):
            for method, args in (self._heal_news, self._receipt):
                if method is not None:
                    ask(method, *args)

    def _report(self) -> None:
        while not self._closed.wait(_REPORT_INTERVAL_S):
            try:
                self.flush()
            except ray.exceptions.RayActorError:
                return
            except ray.exceptions.RayError as error:
                log.warning("records are sent again: %s", error)

    def _write(
        self,
        place: Place,
        step: int,
        generation: int,
        rank: int,
        *,
        slices: list[Any],
        training_state: dict[str, Any],
        started: float,
    ) -> None:
        coordinator = self._coordinator
        try:
            receipt = write_slices(
                open_store(self._job.paths.checkpoints)
                if place == "store"
                else self._memory(slices),
                Keys(),
                rank=rank,
                step=step,
                generation=generation,
                attempt=0,
                slices=slices,
                segment_bytes=self._job.checkpoint.segment_bytes,
            )
            self.flush()  # a checkpoint must not count before its steps are in the records
            if place == "store":
                self._receipt = coordinator.receipt, (receipt, training_state, started)
                ask(*self._receipt[:1], *self._receipt[1])
            else:
                node = self._identity.node
                ask(coordinator.snapshot_part, receipt, training_state, node, started)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            failed = coordinator.save_failed if place == "store" else coordinator.snapshot_skipped
            ask(failed, step, reason)

    def _memory(self, slices: list[Any]) -> Store:
        store = open_memory(self._job.paths.memory, self._identity.node)
        check_room(store, sum(tensor.nbytes for _, tensor in slices))
        return store

    # -- injected faults ---------------------------------------------------------------------------

    def _fire(self, index: int, step: int) -> None:
        fault, worker = self._job.faults[index], self._identity.worker
        if not ask(self._coordinator.claim_fault, index, self._slot, step, worker):
            return
        if fault.kind == "raise":
            raise InjectedError(str(fault))
        if fault.kind == "flip":
            assert self.engine is not None
            flip_bit(self.engine)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _standing_after(standing: Standing, answer: Answer) -> Standing:
    """Where a worker stands once it has this answer."""
    if isinstance(answer, Build):
        return Standing(
            identity=standing.identity,
            formed=answer.formed,
            replica=answer.replica,
            rank=answer.rank,
        )
    if isinstance(answer, Run):
        source = dict(answer.heals).get(answer.position)
        return replace(
            standing,
            generation=answer.generation,
            position=answer.position,
            lanes=answer.lanes[answer.position],
            replicas=len(answer.lanes),
            source=source,
            proven=False,
            behind=source is not None,
        )
    return standing
