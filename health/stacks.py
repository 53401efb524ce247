"""What the threads of a process are doing, asked from outside.

The process has Python's faulthandler write its stacks on a signal, into memory that others can open
under /proc, as with the heartbeat. The handler is C and asks for no lock: it answers while the
interpreter's lock is held, and in a loop. A process that is stopped, or stuck in the kernel, does
not answer; of it the kernel says where each thread waits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Callable
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


def offer_stacks() -> int:
    """Has this process write its stacks on `STACKS_SIGNAL`. Called once, by the main or any other
    thread. Returns the descriptor that it writes to."""
    fd = os.memfd_create("elastictrainer-stacks")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # it is cut off by those who read it
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)
    return fd


def read_stacks(pid: int, fd: int, send: Callable[[int], None]) -> str:
    """The Python stacks of the threads of a process, the latest call first.

    Args:
        pid: the process, which has called `offer_stacks`.
        fd: what that returned there.
        send: sends it a signal.

    Returns:
        The text; what went wrong instead, where it does not answer.
    """
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as memory:
            if os.fstat(memory.fileno()).st_size > _MOST_KEPT_BYTES:
                os.ftruncate(memory.fileno(), 0)
            begin = size = os.fstat(memory.fileno()).st_size
            send(STACKS_SIGNAL)
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
        return f"its stacks cannot be read: {error}\n"
    return text or f"it did not write its stacks within {_ANSWER_S:g} s\n"


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
