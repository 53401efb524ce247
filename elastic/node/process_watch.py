"""The worker processes of one node: who has ended, who is frozen.

The kernel makes a pidfd readable when its process has ended: within milliseconds of a small one's
death. A large one takes its time, in which its flags show what becomes of it. A freeze shows in
samples of the process's state and heartbeat; a frozen process is killed here and now, because only
that closes its sockets and wakes the peers that wait for it.

One thread calls `ended` and `frozen`, others call `watch`, `signal` and `wait_ended`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from elastic.protocol.causes import CRASH, Cause
from elastic.protocol.messages import Death, Evidence
from elastic.reporting.outputs import read_files
from health.answers import Doors, ask_process
from health.flight import latest_of
from health.frozen import STOPPED, History, Sample, decide_frozen, observe
from health.heartbeat import NO_STEP, HeartbeatReader, Record
from health.pace import Pace
from health.process import describe_exit, is_ending, read_born_ticks, read_starved_s, read_state
from health.progress import Place
from health.stacks import Offer, read_kernel_stacks, read_stacks
from health.worker_load import WorkerState
from trainer.loop.phases import PHASES, STEP_PHASES

log = logging.getLogger(__name__)

_WAITING = frozenset(map(PHASES.index, ("reduce", "in_commit")))
"""Numbers of the phases in which a worker waits for other replicas."""
_PATIENT = _WAITING | frozenset(map(PHASES.index, ("wait", "shutdown")))
"""And in which it has done its part, and waits for what follows."""
_STEP = frozenset(map(PHASES.index, STEP_PHASES))
_EVALUATION, _CHECKPOINT = PHASES.index("evaluation"), PHASES.index("checkpoint")
"""An evaluation is entered with each batch."""

_LOCKED = frozenset(map(PHASES.index, ("build", "compile", "profile")))
"""Numbers of the phases in which libraries hold the interpreter's lock for long: NCCL's start, a
compiler, a trace that is written. So they do before the first phase, where they are loaded, and
CUDA is, and in a build beside the steps, whatever the phase."""
LOCKED_TIMES = 10.0
"""A heartbeat may stand still so many times longer there."""

_LAST_BYTES = 16 << 10
"""Of each file of a worker's output that are kept where it is ended, or has ended."""

_LOOK_S = 0.05
"""How often to look for processes that are about to end."""

_LONG_S = 1.0
"""Shorter stays in a phase are not remembered: no bound is below a few seconds."""
_FIRST_STEPS = 2
"""Of a process: its code may be compiled in them. They say nothing of those that follow."""
_FIRST_BATCHES = 2
"""Of a process's evaluations: the data may come from far, for the first time."""
_SETTLED = 100
"""Phases after which a process has more than these behind it, though nobody here has seen it."""


class _HeldUp:
    """How long the one that watches was held up itself, by its `AwakeClock`. Where the container or
    the machine stood still, so did all that is watched."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        """The monotonic clock's lead over the `AwakeClock` at the first look."""
        self._total_s = 0.0
        self._begin_s = self._end_s = 0.0
        """The latest gap, on the monotonic clock: its begin, and the look that found it."""

    def look(self, awake_s: float) -> None:
        """It is `awake_s` on the `AwakeClock`."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s - awake_s
        total_s = now_s - awake_s - self._first_s
        self._begin_s, self._end_s = now_s - max(0.0, total_s - self._total_s), now_s
        self._total_s = total_s

    def until(self, time_s: float) -> float:
        """How long it had been held up by `time_s` of the monotonic clock, which is no earlier than
        the look before the latest one."""
        return self._total_s - max(0.0, self._end_s - max(self._begin_s, time_s))


@dataclass(kw_only=True)
class _Process:
    """A process that is watched."""

    worker: str
    pid: int
    held_up: _HeldUp
    """Of the one that watches."""
    heartbeat: HeartbeatReader | None = None
    unheard: bool = False
    """Its heartbeat could not be opened, and that was told."""
    stacks: Offer | None = None
    recorder: Doors | None = None
    logs: tuple[str, ...] = ()
    history: History | None = None
    reported: bool = False
    """Its death was reported already, before the process came to its end."""
    first_step: float = inf
    """The first step that it was seen in, since the run went back last."""
    seen: Record | None = None
    """Its heartbeat, as it was sampled last."""
    starved_s: float = 0.0
    """How long it had had no core when it was first seen in its present phase."""
    held_s: float = 0.0
    """How long the one that watches had been held up when that phase began."""
    stays_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """The latest long stays in phases of steps in which it waited for nobody."""
    batches: int = 0
    """Batches of evaluations that it was seen to leave behind."""
    batches_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """The latest of them that took long."""

    def sample(self, record: Record) -> None:
        """Notes what its heartbeat shows now."""
        before, self.seen = self.seen, record
        if before is not None and before.serial == record.serial:
            return
        if record.phase in _STEP:
            settled = before is None and record.serial >= _SETTLED
            self.first_step = min(self.first_step, record.step - _FIRST_STEPS * settled)
        if before is not None and before.left == record.left:
            self._went_on(before, self._awake_s(before, record.phase_s))
        self.starved_s = read_starved_s(self.pid, record.thread)
        self.held_s = self.held_up.until(record.phase_s)

    def place(self) -> Place | None:
        """Where it is in its step; None where that is not known."""
        record = None if self.heartbeat is None else self.heartbeat.read()
        if record is None or record.serial == 0:
            return None
        self.sample(record)
        return Place(
            mark=record.serial,
            phase=_phase_of(record),
            in_phase_s=self._awake_s(record, time.monotonic()),
            bound=self._bound(record),
            waits=record.phase in _PATIENT,
            collectives=record.collectives,
            longest_s=max(self._stays_like(record), default=0.0),
        )

    def _bound(self, record: Record) -> Literal["pace", "shared"] | None:
        if self._counts(record):
            return "pace"
        return "shared" if record.phase in _STEP | {_EVALUATION, _CHECKPOINT} else None

    def _went_on(self, record: Record, stay_s: float) -> None:
        """It has left what `record` shows."""
        evaluated = record.phase == _EVALUATION
        self.batches += evaluated
        busy = evaluated or (self._counts(record) and record.phase not in _WAITING)
        if busy and stay_s > _LONG_S:
            self._stays_like(record).append(stay_s)

    def _stays_like(self, record: Record) -> deque[float]:
        return self.batches_s if record.phase == _EVALUATION else self.stays_s

    def _counts(self, record: Record) -> bool:
        """Whether what it does then tells how long that takes, and may be told to take too long."""
        if record.phase == _EVALUATION:
            return self.batches >= _FIRST_BATCHES
        # A newcomer waits as the others do; what its first lanes take, nothing has shown yet.
        first = self.first_step if record.phase in _WAITING else record.first
        known = record.phase in _STEP and first != NO_STEP
        return known and record.step >= first + _FIRST_STEPS

    def _awake_s(self, record: Record, until_s: float) -> float:
        """How long it was in a phase, without the time in which it had no core, or the one that
        watches was held up: a container that was paused accuses nobody."""
        starved_s = read_starved_s(self.pid, record.thread) - self.starved_s
        held_s = self.held_up.until(until_s) - self.held_s
        return max(0.0, until_s - record.phase_s - starved_s - held_s)


class ProcessWatch:
    """Watches worker processes: by pidfd for their end, by heartbeat for a freeze.

    Args:
        freeze_timeout_s: how long a heartbeat may stand still.
    """

    def __init__(self, freeze_timeout_s: float) -> None:
        self._freeze_timeout_s = freeze_timeout_s
        self._processes: dict[int, _Process] = {}
        self._held_up = _HeldUp()
        self._already_dead: list[Death] = []
        self._poll = select.epoll()
        self._lock = threading.Lock()  # a pidfd may not be closed, and reused, while one signals it
        self._gone = threading.Condition(self._lock)

    def watch(
        self,
        worker: str,
        pid: int,
        heartbeat_fd: int | None,
        born_ticks: int | None = None,
        stacks: Offer | None = None,
        recorder: Doors | None = None,
        logs: tuple[str, ...] = (),
    ) -> None:
        """Watches process `pid`, which is `worker`, from now on; reports it where it has ended.
        Twice does no harm, and the second time may bring more than the first, as its heartbeat.

        Args:
            worker: its name.
            pid: its id.
            heartbeat_fd: descriptor of its heartbeat, if it has one.
            born_ticks: when it was started (`health.process`), where that is known: a process of
                the same id that was not is another one, and this one has ended.
            stacks: what `health.stacks.offer_stacks` returned there, if it writes its stack.
            recorder: descriptors by which it tells of its collectives (`health.answers`).
            logs: files that its output goes to.
        """
        with self._lock:
            watched = next(
                (p for p in self._processes.values() if (p.worker, p.pid) == (worker, pid)), None
            )
            if watched is None:
                watched = self._open(worker, pid, born_ticks)
            if watched is not None and heartbeat_fd is not None:
                if watched.heartbeat is None:
                    _open_heartbeat(watched, heartbeat_fd)
                # Who says less, as a coordinator that was started anew, takes nothing back.
                watched.stacks = stacks or watched.stacks
                watched.recorder = recorder or watched.recorder
                watched.logs = logs or watched.logs

    def _open(self, worker: str, pid: int, born_ticks: int | None) -> _Process | None:
        """Begins to watch a process; None where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            # Read after it was opened: whose id has a new owner by now has ended, too.
            if born_ticks is None or read_born_ticks(pid) == born_ticks:
                process = self._processes[pidfd] = _Process(
                    worker=worker, pid=pid, held_up=self._held_up
                )
                self._poll.register(pidfd, select.EPOLLIN)
                return process
            os.close(pidfd)
        detail = "its process was gone when the watch began"
        self._already_dead.append(Death(worker=worker, cause=CRASH, detail=detail))
        return None

    def signal(self, worker: str, number: int) -> None:
        """Sends a signal to the process of `worker`, if it is one of this node's and still runs."""
        with self._lock:
            for pidfd, _ in self._of(worker):
                _send(pidfd, number)

    def states(self) -> list[WorkerState]:
        """What is known of all processes that have a heartbeat."""
        with self._lock:
            return [
                WorkerState(
                    worker=process.worker,
                    pid=process.pid,
                    record=record,
                    waits=record.phase in _WAITING,
                    works=record.phase in _STEP - _WAITING,
                    logs=process.logs,
                )
                for process in self._processes.values()
                if process.heartbeat is not None
                for record in [process.heartbeat.read()]
            ]

    def paces(self) -> dict[int, Pace]:
        """The latest pace of each process that has one, as it was sampled last."""
        with self._lock:
            seen = ((p.pid, p.seen) for p in self._processes.values())
            return {pid: r.pace for pid, r in seen if r is not None and r.pace is not None}

    def _of(self, worker: str) -> list[tuple[int, _Process]]:
        """The process of `worker`, with its pidfd; none where it has ended, or is not watched."""
        return [found for found in self._processes.items() if found[1].worker == worker]

    def places(self) -> dict[str, Place | None]:
        """Where the workers are in their work; None of one of which that is not known."""
        with self._lock:
            return {p.worker: p.place() for p in self._processes.values()}

    def evidence(self, worker: str) -> Evidence | None:
        """What a worker is doing, by its stacks and its collectives; None of one that is not
        watched. It may take three quarters of a second. Called from several threads."""
        with self._lock:
            found = self._of(worker)
        if not found:
            return None
        _, process = found[0]
        stacks = _stacks_of(process)
        recorder, pid = process.recorder, process.pid
        recorded = "" if recorder is None else latest_of(ask_process(pid, recorder))
        return Evidence(stacks=stacks, collectives=recorded)

    def wait_ended(self, workers: Collection[str], timeout_s: float) -> None:
        """Returns when the processes of `workers` have ended, as far as they are watched; after
        `timeout_s` at the latest. Called from threads other than the one that calls `ended`."""
        with self._gone:
            self._gone.wait_for(lambda: not any(map(self._of, workers)), timeout_s)

    def pid_of(self, worker: str) -> int | None:
        """The process of a worker, where it is watched."""
        with self._lock:
            return next((process.pid for _, process in self._of(worker)), None)

    def logs_of(self, worker: str) -> tuple[str, ...]:
        """Files that the output of a worker goes to; none of one that is not watched."""
        with self._lock:
            return next((process.logs for _, process in self._of(worker)), ())

    def kill_all(self, cause: Cause, detail: str) -> list[Death]:
        """Ends all processes. Returns the deaths that are news."""
        with self._lock:
            processes = list(self._processes.items())
            return [death for p in processes for death in _kill_and_report(*p, cause, detail)]

    def ended(self, timeout_s: float) -> list[Death]:
        """Waits up to `timeout_s` for a process to end, or to begin to. Returns the deaths that are
        news."""
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            ready = self._poll.poll(min(left_s, _LOOK_S))
            deaths = [self._already_dead.pop() for _ in range(len(self._already_dead))]
            deaths += [death for pidfd, _ in ready for death in self._take(pidfd)]
            deaths += self._ending()
            if ready or deaths or left_s <= _LOOK_S:
                return deaths

    def _take(self, pidfd: int) -> list[Death]:
        """One that has ended."""
        with self._lock:
            process = self._processes.pop(pidfd)
            self._gone.notify_all()
            self._poll.unregister(pidfd)
            detail = _ended(pidfd, process.pid)
            os.close(pidfd)
        if process.heartbeat is not None:
            process.heartbeat.close()
        known = process.reported
        return [] if known else [Death(worker=process.worker, cause=CRASH, detail=detail)]

    def _ending(self) -> list[Death]:
        """Of those that are about to end. With hundreds of GB of memory, or a GPU that others use,
        too, that takes seconds."""
        deaths = []
        for pidfd, process in list(self._processes.items()):
            if process.reported or not is_ending(process.pid):
                continue
            process.reported = True
            detail = _ended(pidfd, process.pid)
            deaths.append(Death(worker=process.worker, cause=CRASH, detail=detail))
            if read_state(process.pid) == "Z":  # else a core that it dumps would be cut off
                _send(pidfd, signal.SIGKILL)
        return deaths

    def frozen(self, awake_s: float) -> list[Death]:
        """Samples all processes and kills those that are frozen. Returns the deaths that are news.

        Args:
            awake_s: now, on the watcher's `AwakeClock`.
        """
        deaths: list[Death] = []
        with self._lock:
            self._held_up.look(awake_s)
        for pidfd, process in list(self._processes.items()):
            state = read_state(process.pid)
            if state is None or process.reported:
                continue
            record = None if process.heartbeat is None else process.heartbeat.read()
            if record is not None:
                process.sample(record)
            sample = Sample(awake_s=awake_s, state=state, record=record)
            process.history = observe(process.history, sample)
            locked = record is not None and (
                record.serial == 0 or record.builds_beside or record.phase in _LOCKED
            )
            bound_s = self._freeze_timeout_s * (LOCKED_TIMES if locked else 1.0)
            verdict = decide_frozen(process.worker, process.history, bound_s)
            if verdict is not None:
                detail = f"process {process.pid} is frozen: {verdict.evidence[0]}{_where(record)}"
                stopped = state == STOPPED  # it would not answer, and its peers wait
                stacks = read_kernel_stacks(process.pid) if stopped else _stacks_of(process)
                # Not its output: a disk that hangs would keep this thread from killing it.
                found = Evidence(stacks=stacks)
                deaths += _kill_and_report(pidfd, process, Cause(verdict.cause), detail, found)
        return deaths


def _open_heartbeat(process: _Process, fd: int) -> None:
    """Opens its heartbeat, or tells once that it cannot: of one that is about to end that is no
    wonder."""
    pid = process.pid
    try:
        process.heartbeat = HeartbeatReader(pid, fd)
    except OSError as error:
        if process.unheard or read_state(pid) is None or is_ending(pid):
            return
        process.unheard = True
        log.warning(
            "the heartbeat of %s, process %d, cannot be opened: %s. Where it is in its step is not "
            "seen: before health.collective_timeout_s ends what waits for it, it may hang. Does it "
            "run as user %d, as its node's agent does, in the same container?",
            process.worker,
            pid,
            error,
            os.geteuid(),
        )


def _send(pidfd: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _stacks_of(process: _Process) -> str:
    kernel = read_kernel_stacks(process.pid)
    if process.stacks is None:
        return kernel
    return read_stacks(process.pid, process.stacks) + kernel


def last_words(logs: Sequence[str]) -> str:
    """The end of a worker's output, file by file."""
    found = read_files(logs, _LAST_BYTES)
    return "".join(f"==> {name} <==\n{text}\n" for name, text in found.items() if text)


def _kill_and_report(
    pidfd: int, process: _Process, cause: Cause, detail: str, found: Evidence | None = None
) -> list[Death]:
    """Kills a process and reports it at once: one that is stuck in the kernel may take its time."""
    _send(pidfd, signal.SIGKILL)
    if process.reported:
        return []
    process.reported = True
    return [Death(worker=process.worker, cause=cause, detail=detail, evidence=found)]


def _ended(pidfd: int, pid: int) -> str:
    how = describe_exit(pidfd, pid)
    return f"process {pid} ended" + ("" if how is None else f" {how}")


def _where(record: Record | None) -> str:
    if record is None or record.phase not in range(len(PHASES)):
        return ""
    if record.serial == 0:
        return "; it was about to begin"
    return f"; it was in {_phase_of(record)}"


def _phase_of(record: Record) -> str:
    name = PHASES[record.phase] if record.phase in range(len(PHASES)) else "unknown"
    return f"phase {name}" + ("" if record.step == NO_STEP else f" of step {record.step}")
