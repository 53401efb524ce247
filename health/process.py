"""What the kernel says of a process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("Q52xi")
"""What is asked for and, last, the exit status. Source: the kernel's uapi/linux/pidfd.h."""
_PF_EXITING = 1 << 2
"""Of a task's flags. Source: the kernel's linux/sched.h."""


def _after_name(stat: str) -> list[str]:
    """The fields of a line of /proc/<pid>/stat from the state on. The name before it is the
    process's own to choose, with brackets and blanks: its last bracket counts."""
    return stat[stat.rindex(")") + 1 :].split()


def parse_state(stat: str) -> str:
    """The state letter in a line of /proc/<pid>/stat: R running, S asleep, D asleep and not to be
    woken, T stopped by a signal, t stopped by a debugger, Z ended. Source: proc_pid_stat(5)."""
    return _after_name(stat)[0]


def parse_born_ticks(stat: str) -> int:
    """When the process of such a line was started, in clock ticks since the machine was."""
    return int(_after_name(stat)[19])


def parse_cpu_ticks(stat: str) -> int:
    """The processor time of all threads of the process of such a line, in clock ticks."""
    user, system = _after_name(stat)[11:13]
    return int(user) + int(system)


def parse_ending(stat: str) -> bool:
    """Whether the first thread of the process of such a line has ended, or is about to: a process
    first gives its memory back, 50 ms for each GB, and what it has of GPUs. Its peers' connections
    are closed after that."""
    state, *others = _after_name(stat)
    return state == "Z" or bool(int(others[5]) & _PF_EXITING)


def parse_exit_status(stat: str) -> int:
    """What a parent will be told by wait(2) of the process of such a line."""
    return int(_after_name(stat)[49])


def read_state(pid: int) -> str | None:
    """The state letter of process `pid`; None where it is gone."""
    stat = read_stat(pid)
    return None if stat is None else parse_state(stat)


def is_ending(pid: int) -> bool:
    """Whether process `pid` is about to end (`parse_ending`). Of one that does not show, or is
    gone, this says nothing."""
    stat = read_stat(pid)
    return stat is not None and parse_ending(stat)


def read_born_ticks(pid: int) -> int | None:
    """When process `pid` was started (`parse_born_ticks`); None where it is gone. Two processes
    that have the same id, one after the other, differ in it."""
    stat = read_stat(pid)
    return None if stat is None else parse_born_ticks(stat)


def read_starved_s(pid: int, thread: int) -> float:
    """How long a thread of process `pid` was able to run and had no core, since it began, in
    seconds; 0.0 where the kernel does not say. Source: the kernel's sched-stats.rst."""
    try:
        stats = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(stats.split()[1]) / 1e9


def read_stat(pid: int) -> str | None:
    """The line of /proc/<pid>/stat; None where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None


def describe_exit(pidfd: int, pid: int) -> str | None:
    """How a process ended that was no child of ours, or is about to end, as "by SIGSEGV"; None
    where the kernel does not say: before Linux 6.15 it forgets that when the parent has taken
    notice, as Ray's node does at once.

    Args:
        pidfd: opened while it ran.
        pid: its id.
    """
    status = _status_of_ending(pid)
    if status is None:  # asked last: its parent may take notice between the two
        status = _status_of_gone(pidfd)
    if status is None:
        return None
    number = os.waitstatus_to_exitcode(status)
    if number >= 0:
        return f"with status {number}"
    known_by_name = -number in {one.value for one in signal.Signals}
    return f"by {signal.Signals(-number).name}" if known_by_name else f"by signal {-number}"


def _status_of_gone(pidfd: int) -> int | None:
    """The exit status of a process that its parent has taken notice of."""
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    known, status = _PIDFD_INFO.unpack(info)
    return int(status) if known & _PIDFD_INFO_EXIT else None


def _status_of_ending(pid: int) -> int | None:
    """That of one that its parent has not, or that is still about to end. 0 tells nothing: it also
    stands for what only the process's owner may read, and for a first thread that has ended
    alone."""
    stat = read_stat(pid)
    return None if stat is None or not parse_ending(stat) else parse_exit_status(stat) or None


def output_files() -> tuple[str, ...]:
    """The files that this process's standard output and error go to; none where that is a terminal
    or a pipe, or is closed."""
    return tuple(name for name in dict.fromkeys(_outputs()) if os.path.isfile(name))


def output_folders() -> frozenset[str]:
    """The directories in which those lie, or lay: who clears up old files may have removed them."""
    return frozenset(map(os.path.dirname, _outputs()))


def _outputs() -> Iterator[str]:
    """What standard output and error go to, as the kernel names it."""
    for number in (1, 2):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{number}")
