"""A worker's heartbeat: a record in memory that its node agent can read and that costs the worker
nothing.

Three hands write it. The training loop marks each phase that it enters: a few stores into mapped
memory, no call to the system, no lock. A thread beats ten times a second, for as long as the
process runs and somebody else gets the interpreter's lock (GIL) now and then. So a beat that does
not change means a process that is stopped, stuck in the kernel, or stuck with the lock held. With
each beat it writes how many collectives the worker has begun: of several that stand still, the one
that has begun fewer is the one that its peers wait for. Every few seconds the loop writes its pace.
What is built beside the steps says that it goes on.

The memory is a file without a name (memfd): who knows the process and the descriptor's number can
open it under /proc, and the kernel frees it with its last user. Nothing is left behind, however the
process ends. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from health.pace import Pace, pace_of

BEAT_INTERVAL_S = 0.1
"""Between two beats of the thread."""

NO_STEP = -1
"""Shown before a worker has a step."""

NO_PHASE = -1
"""Shown for a phase without a number."""

# Native alignment: each number is one aligned eight-byte store, so none is ever seen half written.
_MARK = struct.Struct("@qqqd")
_BEAT = struct.Struct("@dq")
_NUMBER = struct.Struct("@q")
_RECORD = struct.Struct("@qqqddqqqqq")
_PACE = struct.Struct("@q7d")
_BESIDE_AT, _PACE_AT = _RECORD.size - _NUMBER.size, _RECORD.size
_FIRST_AT = _BESIDE_AT - _NUMBER.size
_LEFT_AT = _FIRST_AT - _NUMBER.size
_PACED_AT = _PACE_AT + _PACE.size
"""Here stands the number of the pace once more, written last."""
_SIZE = _PACED_AT + _NUMBER.size


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a heartbeat shows. Marks are not atomic: a reader may see the step of one mark with the
    phase of the next."""

    serial: int
    """Marks so far; 0: none yet."""
    step: int
    """Step the worker is in, `NO_STEP` where it has none."""
    phase: int
    """Number of the phase it entered last."""
    phase_s: float
    """When it entered it, on the monotonic clock."""
    beat_s: float
    """When the thread beat last, on the monotonic clock."""
    collectives: int
    """Collectives that the worker has begun with the others of its replica, by that beat."""
    thread: int
    """Id, in the kernel, of the thread that trains."""
    left: int
    """How often it has left its steps, called away or because a peer was lost."""
    first: int = NO_STEP
    """The first step that it has computed in, since the run went back last; `NO_STEP`: none."""
    builds_beside: bool = False
    """Whether it builds a part of a replica beside the steps, on a thread."""
    pace: Pace | None = None
    """Its pace in the latest window; None: there was none, or it is just being written."""


def parse_record(data: bytes) -> Record:
    """The record in `data`, which has the size of one."""
    numbers = _RECORD.unpack_from(data)
    serial, step, phase, phase_s, beat_s, collectives, thread, left, first, beside = numbers
    return Record(
        serial=serial,
        step=step,
        phase=phase,
        phase_s=phase_s,
        beat_s=beat_s,
        collectives=collectives,
        thread=thread,
        left=left,
        first=first,
        builds_beside=bool(beside),
        pace=_parse_pace(data),
    )


def _parse_pace(data: bytes) -> Pace | None:
    number, *times = _PACE.unpack_from(data, _PACE_AT)
    (last,) = _NUMBER.unpack_from(data, _PACED_AT)
    return None if number == 0 or number != last else pace_of(number, times)


class Heartbeat:
    """The worker's side. It beats from its construction, by the thread that trains, until the
    process ends.

    Args:
        count: how many collectives the worker has begun; called with each beat.
        computing: numbers of the phases in which it computes with its lanes.
    """

    def __init__(
        self, count: Callable[[], int] = lambda: 0, computing: Collection[int] = ()
    ) -> None:
        self._count, self._computing = count, computing
        self.fd = os.memfd_create("elastictrainer-heartbeat")
        os.ftruncate(self.fd, _SIZE)
        self._memory = mmap.mmap(self.fd, _SIZE)
        self._serial = self._left = 0
        self._first = NO_STEP
        _NUMBER.pack_into(self._memory, _FIRST_AT, NO_STEP)
        self._beat()
        _NUMBER.pack_into(self._memory, _MARK.size + _BEAT.size, threading.get_native_id())
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def mark(self, step: int, phase: int) -> None:
        """The worker enters a phase. Called by one thread only; on the step path."""
        self._serial += 1
        _MARK.pack_into(self._memory, 0, self._serial, step, phase, time.monotonic())
        if phase in self._computing and not NO_STEP < self._first <= step:
            self._first = step
            _NUMBER.pack_into(self._memory, _FIRST_AT, step)

    def leave(self) -> None:
        """The worker leaves its steps: the phase that it was in may have been broken off."""
        self._left += 1
        _NUMBER.pack_into(self._memory, _LEFT_AT, self._left)

    def build_beside(self, goes_on: bool) -> None:
        """A build beside the steps begins, or ends. Called by its thread, of which there is one at
        a time."""
        _NUMBER.pack_into(self._memory, _BESIDE_AT, goes_on)

    def show(self, pace: Pace) -> None:
        """The pace of a window that is full. Its number is written first and last."""
        _PACE.pack_into(self._memory, _PACE_AT, *vars(pace).values())
        _NUMBER.pack_into(self._memory, _PACED_AT, pace.number)

    def _beat(self) -> None:
        _BEAT.pack_into(self._memory, _MARK.size, time.monotonic(), self._count())

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_INTERVAL_S)
            self._beat()


class HeartbeatReader:
    """The node agent's side.

    Args:
        pid: the worker's process.
        fd: number of the heartbeat's descriptor in it (`Heartbeat.fd`).

    Raises:
        OSError: there is no such process or descriptor, or it belongs to another user.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self._file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> Record:
        """The record now."""
        return parse_record(os.pread(self._file, _SIZE, 0))

    def close(self) -> None:
        """Lets go of the memory."""
        os.close(self._file)
