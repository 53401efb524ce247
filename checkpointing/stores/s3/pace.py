"""How fast the processes of a node may ask a store, found out together.

S3 answers 503 SlowDown where a prefix gets more requests than it has grown for. The processes of a
node then slow down together: additive increase while requests succeed, multiplicative decrease on a
SlowDown, at most once a second because the requests under way all fail at once (AIMD, as in TCP).
What they share is 32 bytes in a file in tmpfs under a lock: a few microseconds a request, which
takes milliseconds. What to do is pure (`decide_*`); `Pacer` applies it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")
"""Where the files lie that the processes of a node share."""

START_PER_S = 500.0
"""A node's first rate."""
MAX_PER_S = 5000.0
"""Above what one prefix takes: 3,500 writes or 5,500 reads a second."""
MIN_PER_S = 25.0
"""128 nodes at this rate together stay below what one prefix takes."""
GAIN_PER_S2 = 20.0
"""By how much the rate grows in a second without a SlowDown."""
FACTOR = 0.7
"""What a SlowDown leaves of the rate."""
_HOLD_S = 1.0

BACKOFF_S = 0.1
"""Bound of the pause before the second try; it doubles from try to try."""
MAX_BACKOFF_S = 8.0
"""Bound of any pause."""

_FORM = struct.Struct("<4d")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What the processes of a node have agreed on. Times are of the system's monotonic clock."""

    per_s: float = START_PER_S
    """Requests a second."""
    next_s: float = 0.0
    """When the next request may go out."""
    raised_s: float = 0.0
    """When a success raised `per_s` last."""
    lowered_s: float = 0.0
    """When a SlowDown lowered it last."""


def decide_turn(pace: Pace, now_s: float) -> tuple[Pace, float]:
    """Takes the next turn. Returns the pace after it, and how long to wait for the turn."""
    turn_s = max(pace.next_s, now_s)
    return replace(pace, next_s=turn_s + 1 / pace.per_s), turn_s - now_s


def decide_faster(pace: Pace, now_s: float) -> Pace:
    """The pace after a success; idle time earns no more than a second of growth."""
    elapsed_s = min(max(now_s - pace.raised_s, 0.0), _HOLD_S)
    per_s = min(pace.per_s + GAIN_PER_S2 * elapsed_s, MAX_PER_S)
    return replace(pace, per_s=per_s, raised_s=now_s)


def decide_slower(pace: Pace, now_s: float) -> Pace:
    """The pace after a SlowDown."""
    if now_s - pace.lowered_s < _HOLD_S:
        return pace
    per_s = max(pace.per_s * FACTOR, MIN_PER_S)
    return replace(pace, per_s=per_s, raised_s=now_s, lowered_s=now_s)


def plan_pause(tries: int, random_0_1: float) -> float:
    """Seconds before the next try after `tries` failed ones, with full jitter.

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    return random_0_1 * min(BACKOFF_S * 2.0 ** min(tries - 1, 30), MAX_BACKOFF_S)


class Pacer:
    """Keeps this process to the pace of its node.

    Where tmpfs cannot be shared, this process keeps a pace of its own.

    Args:
        file: where the processes of this node keep the pace, see `shared_file`.
    """

    def __init__(self, file: Path) -> None:
        self._lock = threading.Lock()  # a file lock does not hold off threads of one process
        self._file = _open_shared(file)
        self._own = Pace()

    @property
    def pace(self) -> Pace:
        """The pace now."""
        with self._held() as pace:
            return pace

    def wait(self) -> float:
        """Waits for a turn. Returns how long that took, in seconds."""
        with self._held() as pace:
            after, wait_s = decide_turn(pace, time.monotonic())
            self._store(after)
        if wait_s > 0:
            time.sleep(wait_s)
        return wait_s

    def faster(self) -> None:
        """A request has succeeded."""
        with self._held() as pace:
            self._store(decide_faster(pace, time.monotonic()))

    def slower(self) -> None:
        """The store has asked to slow down."""
        with self._held() as pace:
            self._store(decide_slower(pace, time.monotonic()))

    @contextlib.contextmanager
    def _held(self) -> Iterator[Pace]:
        with self._lock:
            if self._file is None:
                yield self._own
                return
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                raw = os.pread(self._file, _FORM.size, 0)
                yield _unpack(raw) if len(raw) == _FORM.size else Pace()
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _store(self, pace: Pace) -> None:
        self._own = pace
        if self._file is not None:
            raw = _FORM.pack(pace.per_s, pace.next_s, pace.raised_s, pace.lowered_s)
            os.pwrite(self._file, raw, 0)


def _unpack(raw: bytes) -> Pace:
    per_s, next_s, raised_s, lowered_s = _FORM.unpack(raw)
    return Pace(per_s=per_s, next_s=next_s, raised_s=raised_s, lowered_s=lowered_s)


def shared_file(what: str, folder: Path | None = None) -> Path:
    """Where this user's processes on this node keep the pace for `what`, a server and bucket."""
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    return (folder or SHARED) / f"elastictrainer-pace-{os.getuid()}" / name


@functools.lru_cache(maxsize=64)
def shared_pacer(file: Path) -> Pacer:
    """The one `Pacer` of this process for a file."""
    return Pacer(file)


def _open_shared(path: Path) -> int | None:
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        found = path.parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(f"{path.parent} is not a directory of this user")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _log.warning("every process of this node keeps its own pace towards S3: %s", error)
        return None
