"""What a process is doing, asked from outside.

One thread, the one that trains, has Python's faulthandler write its stack on a signal, into memory
that others can open under /proc, as with the heartbeat. The handler is C and asks for no lock: it
answers while the interpreter's lock is held, and in a loop. A process that is stopped, or stuck in
the kernel, does not answer; of it the kernel says where each thread waits.

The signal goes to that thread, which writes its own stack and no other: faulthandler reads those of
other threads while they run, and crashed in 267 of 702 looks at a process with three threads busy
in Python; of looks at each thread by itself in none of 5,806.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import platform
import signal
import threading
import time
from pathlib import Path

from health.process import parse_state

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""One that libraries have no use for."""

_ANSWER_S = 0.25
"""A process that has not answered by then will not."""
_QUIET_S = 0.02
"""Nothing was added for so long: the answer is whole."""
_LOOK_S = 0.005
_MOST_BYTES = 200_000
_MOST_KEPT_BYTES = 1 << 20
"""Of earlier answers: they count as the process's own memory."""


_TGKILL = {"x86_64": 234, "aarch64": 131}
"""The system call's number: glibc has a function since 2.30, Amazon Linux 2 has an older one."""

Offer = tuple[int, int]
"""The descriptor that stacks are written to, and the thread whose they are (its native id)."""


def offer_stacks() -> Offer:
    """Has the thread that calls it, and any other that gets it, write its stack on `STACKS_SIGNAL`.
    Called once."""
    fd = os.memfd_create("elastictrainer-stacks")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # it is cut off by those who read it
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=False)
    return fd, threading.get_native_id()


def signal_thread(pid: int, thread: int, number: int) -> None:
    """Sends a signal to one thread of a process, by its kernel's number.

    Raises:
        OSError: it has ended, or may not be signalled.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_TGKILL[platform.machine()], pid, thread, int(number)) != 0:
        raise OSError(ctypes.get_errno(), f"thread {thread} of process {pid} gets no signal")


def read_stacks(pid: int, offer: Offer) -> str:
    """The Python stack of a thread, the latest call first.

    Args:
        pid: the process, which has called `offer_stacks`.
        offer: what that returned there.

    Returns:
        The text; what went wrong instead, where it does not answer.
    """
    fd, thread = offer
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as memory:
            if os.fstat(memory.fileno()).st_size > _MOST_KEPT_BYTES:
                os.ftruncate(memory.fileno(), 0)
            begin = size = os.fstat(memory.fileno()).st_size
            signal_thread(pid, thread, STACKS_SIGNAL)
            asked_s = grew_s = time.monotonic()
            while (now_s := time.monotonic()) - asked_s < _ANSWER_S:
                grown = os.fstat(memory.fileno()).st_size
                if grown > size:
                    size, grew_s = grown, now_s
                elif size > begin and now_s - grew_s > _QUIET_S:
                    break
                time.sleep(_LOOK_S)
            text = os.pread(memory.fileno(), min(size - begin, _MOST_BYTES), begin).decode()
    except OSError as error:
        return f"its stack cannot be read: {error}\n"
    return text or f"it did not write its stack within {_ANSWER_S:g} s\n"


def read_kernel_stacks(pid: int) -> str:
    """For each thread of process `pid` its name, its state, and where in the kernel it waits; a
    line each. Source: proc_pid_wchan(5)."""
    lines = ["Threads, by the kernel:"]
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(OSError):
                state = parse_state((task / "stat").read_text(errors="replace"))
                name = (task / "comm").read_text(errors="replace").strip()
                where = (task / "wchan").read_text(errors="replace").strip()
                lines.append(f"  {task.name} {name}: {state} {where}")
    return "\n".join(lines) + "\n"
