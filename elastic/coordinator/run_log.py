"""The run's records as its coordinator writes them: steps, events, and what checks them."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from elastic.coordinator.config import CoordinatorConfig
from elastic.membership.decisions import Effects, Regrouped
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.messages import Stop
from elastic.reporting.event_log import EventLog
from trainer.loop.samples import LedgerError

log = logging.getLogger(__name__)


def decide_equal(
    digests: Mapping[str, Mapping[str, str]], *, slots: int, replicas: int
) -> bool | None:
    """Whether all replicas have the same state; None where that is not known (yet), or there is but
    one.

    Args:
        digests: slot -> worker -> digest of its state.
        slots: workers of a replica.
        replicas: those that are known to have state; more may hand theirs in.
    """
    if any(len(set(found.values())) > 1 for found in digests.values()):
        return False
    compared = min((len(found) for found in digests.values()), default=0)
    return True if len(digests) == slots and compared >= max(2, replicas) else None


_MOST_TOLD = 1000
"""Events that may be told between one and its repetition."""

_HELD_BACK_S = 1.0
"""An answer that waits so long for the storage is late for whoever is to follow it."""

CLOSE_S = 60.0
"""How long the storage may take to close the records. Till then the run holds its machines."""


async def await_closed(closing: Future[None]) -> None:
    """Waits until the records are closed (see `RunLog.end`), for `CLOSE_S` at most: what is written
    is in the operating system's hands, and outlives this process.

    Raises:
        OSError: they cannot be written.
    """
    closed = asyncio.wrap_future(closing)
    await asyncio.wait((closed,), timeout=CLOSE_S)
    if closed.done():
        closed.result()
    else:
        log.error(
            "the storage of the run's records has not answered for %.0f s: the run ends without "
            "it, and its last records are lost if this machine is, too",
            CLOSE_S,
        )


class RunLog:
    """Steps and events on their way to the files. A record that cannot be written ends the run.

    Args:
        config: where the records go, which samples each step must take, the first event.
        membership: told how many steps are recorded, and when the run must stop.
    """

    def __init__(self, config: CoordinatorConfig, membership: Membership) -> None:
        self._config, self._membership = config, membership
        self.followers: list[Callable[[events.Event], None]] = []
        """Told of each event that is written down."""
        self._digests: dict[str, dict[str, str]] = {}
        """Slot -> worker -> digest of its state at the end, in the newest roster."""
        self._equal: bool | None = None
        """What was noted of them."""
        self._short_of = 0
        self._began = config.started.start_step
        self._gathering = 0
        """Generation of the roster that workers are called for, until they have come."""
        self._came = 0.0
        """When the last of them came, in seconds since the epoch."""
        self._decided = False
        """`EndDecided` is written."""
        self._over = False
        """`RunEnded` is written: nothing follows it in this start of the run."""
        self._told = deque[tuple[str, float]](maxlen=_MOST_TOLD)
        """Kind and time of events that were written down last: a call that tells of them may be
        repeated, and come to another coordinator."""
        self._written = self._durable = 0
        """Records, and how many of them outlive this machine."""
        self._failed = False
        """A record could not be written, or may be gone with this machine."""
        self._syncing: asyncio.Future[None] | None = None
        self._sync_began_s, self._held_back_s = math.inf, -math.inf
        """When that began, and when one ended last that took long, by a clock that does not
        jump."""
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        config.paths.root.mkdir(parents=True, exist_ok=True)
        self._event_log = EventLog(config.paths.events)
        self._step_log = EventLog(config.paths.steps)

    def begin(self, happened: Sequence[events.Event]) -> None:
        """Notes that the run has begun, or, where this start of it has `happened` so far, that its
        coordinator has anew. Where it has ended, nothing is written any more."""
        for event in happened:
            if isinstance(event, events.EndDecided | events.RunEnded):
                self._decided, self._over = True, isinstance(event, events.RunEnded)
                self._membership.stopped = Stop(error=event.error, cause=event.cause)
        self._told.extend((event.kind, event.time) for event in happened)
        anew = bool(happened)
        if not anew:
            self.note(self._config.started)
        self.note(events.CoordinatorStarted(time=time.time(), pid=os.getpid(), anew=anew))

    @property
    def steps_path(self) -> Path:
        """The file of committed steps."""
        return self._config.paths.steps

    @property
    def over(self) -> bool:
        """Whether the run has ended: nothing is written down any more."""
        return self._over

    def note(self, event: events.Event) -> None:
        """Writes an event down, unless the run has ended."""
        if self._over:
            return
        self._append(self._event_log, event)
        for follower in self.followers:
            follower(event)

    def take_events(self, told: Sequence[events.Event]) -> None:
        """Writes down what a worker tells. What it has told before is passed by: its answer was
        lost, or the coordinator that took it."""
        for event in told:
            if (event.kind, event.time) not in self._told:
                self._told.append((event.kind, event.time))
                self.note(event)

    def take_steps(self, steps: Sequence[events.StepRecord]) -> list[events.StepRecord]:
        """Writes committed steps down, and returns them. Those known already are passed by, and all
        while the run goes back: they will be done again, perhaps with other samples."""
        membership, taken = self._membership, list[events.StepRecord]()
        for step in [] if self._over or membership.progress.going_back else steps:
            if membership.progress.awaits(step.step, step.generation):
                self._check_ledger(step)
                self._append(self._step_log, step)
                membership.progress.record(step.step)
                taken.append(step)
        return taken

    async def durable(self) -> bool:
        """Waits until what was written so far outlives this machine, whose storage may be another
        one's, with a cache here. On a thread: nothing else waits. Those who wait at one time share
        one `fdatasync` of each file. What has no room there waits in memory, and nobody for it: see
        `EventLog`. Returns whether it does: else the run has been ended."""
        written = self._written
        while self._durable < written:
            if self._syncing is None:
                self._syncing = asyncio.ensure_future(self._sync())
            await asyncio.shield(self._syncing)
        return not self._failed

    async def _sync(self) -> None:
        written, loop = self._written, asyncio.get_running_loop()
        self._sync_began_s = began_s = time.monotonic()
        try:
            for log in (self._event_log, self._step_log):
                await loop.run_in_executor(self._sync_thread, log.sync)
        except OSError as error:
            self._fail(error)
        if time.monotonic() - began_s > _HELD_BACK_S:
            self._held_back_s = time.monotonic()
        self._durable, self._syncing, self._sync_began_s = written, None, math.inf

    def answered_for_s(self) -> float:
        """For how long now no answer of the coordinator was held back by the storage, in
        seconds."""
        now_s = time.monotonic()
        if now_s - self._sync_began_s > _HELD_BACK_S:
            return 0.0
        return now_s - self._held_back_s

    def _append(self, log: EventLog, record: events.Event | events.StepRecord) -> None:
        self._written += 1
        try:
            log.append(record)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed = True
        self._membership.stop(f"the run's records cannot be written: {error}")

    def _check_ledger(self, step: events.StepRecord) -> None:
        try:
            ledger = replace(self._config.ledger, skips=self._membership.skips)
            ledger.check(step.step, step.sample_digests)
        except LedgerError as error:
            self._membership.stop(str(error))

    def arrives(self, worker: str) -> None:
        """A worker joins; told before membership is. One that was called has let go of its step."""
        if worker in self._membership.calls.unfollowed:
            self._came = time.time()

    def write_down(self, effects: Effects) -> None:
        """Notes what membership has decided."""
        now, membership = time.time(), self._membership
        if effects.called is not None:
            generation = membership.progress.generation + (effects.regrouped is None)
            self.note(events.RegroupCalled(time=now, generation=generation, reason=effects.called))
            self._gathering, self._came = generation, now
        self._note_gathered(effects)
        for replica in effects.formed:
            self.note(
                events.ReplicaForming(
                    time=now,
                    formed=replica.formed,
                    replica=replica.index,
                    workers=list(replica.workers),
                )
            )
        for worker, detail in effects.refused.items():
            node = membership.members[worker].node
            self.note(events.WorkerRefused(time=now, worker=worker, node=node, detail=detail))
        if effects.regrouped is not None:
            self._digests, self._equal = {}, None
            if effects.regrouped.outcome == "restore":
                self._began = min(self._began, effects.regrouped.step)
            self.note(_regroup_done(now, effects.regrouped, self._config.checkpoint.fixed_steps))
        if effects.short_of > self._short_of:
            self.note(_below_minimum(now, membership, effects.short_of))
        self._short_of = effects.short_of
        if membership.stopped is not None and not self._decided:
            self._decided, stop = True, membership.stopped
            self.note(events.EndDecided(time=now, error=stop.error, cause=stop.cause))

    def _note_gathered(self, effects: Effects) -> None:
        """Once for a call. Not all who were called need to have come: no roster waits for those
        that will go."""
        gathered = effects.regrouped is not None or not self._membership.calls.unfollowed
        if self._gathering and gathered and self._membership.stopped is None:
            self.note(events.RegroupGathered(time=self._came, generation=self._gathering))
            self._gathering = 0

    def compare(self, worker: str, generation: int, slot: str, digest: str) -> bool:
        """Whether a worker's state at the end is that of the others in `slot`, as far as known.
        One of an older roster is passed by: all who are in the newest hand theirs in again."""
        membership = self._membership
        roster, behind = membership.roster, membership.heals.behind
        if generation != roster.generation:
            return True
        self._digests.setdefault(slot, {})[worker] = digest
        equal = decide_equal(
            self._digests,
            slots=membership.config.workers_per_replica,
            replicas=sum(replica.formed not in behind for replica in roster.replicas),
        )
        if equal is not None and equal != self._equal:
            self._equal, step = equal, membership.until
            self.note(
                events.ReplicasCompared(
                    time=time.time(),
                    step=step,
                    equal=equal,
                    generation=generation,
                    replicas=max(map(len, self._digests.values())),
                )
            )
        return equal is not False

    def end(self, outcome: events.RunOutcome, error: str | None) -> Future[None]:
        """Writes the last event, and has the records closed, on a thread: that waits for the
        storage. Returns what is done when they are closed, or has the OSError. Once more, nothing
        is written."""
        if not self._over:
            self._write_end(outcome, error)
        return self._sync_thread.submit(self._close)

    def _write_end(self, outcome: events.RunOutcome, error: str | None) -> None:
        membership = self._membership
        undone = membership.progress.restore_step < membership.config.steps
        if outcome == "finished" and membership.winding_down and undone:
            outcome = "stopped"
        finished = membership.stopped is not None and membership.stopped.error is None
        membership.stop(f"the run was {outcome}")
        cause = membership.stopped.cause if membership.stopped and outcome == "failed" else None
        if finished:
            steps = membership.progress.recorded - self._began
            self.note(events.LedgerChecked(time=time.time(), steps=steps))
        step = membership.progress.recorded
        self.note(
            events.RunEnded(time=time.time(), step=step, outcome=outcome, error=error, cause=cause)
        )
        self._over = True

    def _close(self) -> None:
        with self._event_log, self._step_log:  # each is closed, also where the other is not
            pass


def _regroup_done(now: float, regrouped: Regrouped, every_steps: int | None) -> events.RegroupDone:
    roster = regrouped.roster
    return events.RegroupDone(
        time=now,
        generation=roster.generation,
        step=regrouped.step,
        replicas=len(roster.replicas),
        lanes={str(index): list(lanes) for index, lanes in roster.lanes.items()},
        renumbered={str(old): new for old, new in regrouped.renumbered.items()},
        outcome=regrouped.outcome,
        lost_steps=regrouped.lost_steps,
        repeated_steps=int(regrouped.outcome == "repeat"),
        save_cut_off=_is_cut_off(regrouped, every_steps),
    )


def _is_cut_off(regrouped: Regrouped, every_steps: int | None) -> bool:
    """Whether a regroup came between those who saw a commit, and began the checkpoint that was due
    there, and the others: what they have begun will lack parts.

    Args:
        regrouped: the new roster.
        every_steps: how often a checkpoint is due; None: not by the number of steps.
    """
    saving, step = regrouped.saving, regrouped.step
    due = saving.wanted or (every_steps is not None and step % every_steps == 0)
    return regrouped.outcome == "finish_step" and due and "store" not in saving.busy


def _below_minimum(now: float, membership: Membership, missing: int) -> events.BelowMinimum:
    config, places = membership.config, membership.places
    idle = sum(worker in membership.waiting and not places.of(worker) for worker in places.retired)
    others = idle + len(places.idle) - membership.formations.usable
    besides = (
        f"; {others} more are here and get no place: their machines are at fault or will go, or "
        f"their versions are others (worker_refused)"
    )
    return events.BelowMinimum(
        time=now,
        alive=places.whole,
        needed=config.min_replicas,
        missing=f"{missing} workers (a replica has {config.workers_per_replica}); add machines or "
        f"lower scaling.min_replicas{besides if others else ''}",
    )
