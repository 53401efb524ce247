"""What the kernel says of a process."""

from __future__ import annotations

import os
from pathlib import Path


def parse_state(stat: str) -> str:
    """The state letter in a line of /proc/<pid>/stat: R running, S asleep, D asleep and not to be
    woken, T stopped by a signal, t stopped by a debugger, Z ended.

    The name before it is the process's own to choose, with brackets and blanks: its last bracket
    counts. Source: proc_pid_stat(5).
    """
    return stat[stat.rindex(")") + 1 :].split()[0]


def parse_born_ticks(stat: str) -> int:
    """When the process of such a line was started, in clock ticks since the machine was."""
    return int(stat[stat.rindex(")") + 1 :].split()[19])


def parse_cpu_ticks(stat: str) -> int:
    """The processor time of all threads of the process of such a line, in clock ticks."""
    user, system = stat[stat.rindex(")") + 1 :].split()[11:13]
    return int(user) + int(system)


def read_state(pid: int) -> str | None:
    """The state letter of process `pid`; None where it is gone."""
    stat = read_stat(pid)
    return None if stat is None else parse_state(stat)


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


def output_files() -> tuple[str, ...]:
    """The files that this process's standard output and error go to; none where that is a terminal
    or a pipe."""
    names = (os.readlink(f"/proc/self/fd/{number}") for number in (1, 2))
    return tuple(name for name in dict.fromkeys(names) if os.path.isfile(name))
