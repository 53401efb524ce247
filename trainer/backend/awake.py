"""How long a thread has wanted to run: all but the time in which it slept, waiting for others."""

from __future__ import annotations

import contextlib
import os
import time

_SCHEDSTAT = "/proc/thread-self/schedstat"


class AwakeTime:
    """Of the thread that makes it, for that thread to read.

    Time with a core, and time in which it was ready and had none, as on a machine that is busy or
    held back by a cgroup. Gloo's collectives put the thread that waits for them to sleep, wherever
    in a model they are. Two calls to the kernel, a microsecond. Source: the kernel's
    sched-stats.rst. Where the kernel does not say, it is the time with a core alone.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> float:
        """In seconds, since the thread began."""
        waited = 0 if self._file is None else int(os.pread(self._file, 80, 0).split()[1])
        return time.thread_time() + waited / 1e9

    def close(self) -> None:
        """Lets go of the kernel's file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
