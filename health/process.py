"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path


def parse_state(stat: str) -> str:
    """The state letter in a line of /proc/<pid>/stat: R running, S asleep, D asleep and not to be
    woken, T stopped by a signal, t stopped by a debugger, Z ended.

    The name before it is the process's own to choose, with brackets and blanks: its last bracket
    counts. Source: proc_pid_stat(5).
    """
    return stat[stat.rindex(")") + 1 :].split()[0]


def read_state(pid: int) -> str | None:
    """The state letter of process `pid`; None where it is gone."""
    try:
        return parse_state(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None
