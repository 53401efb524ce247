"""How many processes the kernel has ended because memory ran out, by its own count.

The count of the own cgroup is of the processes in it, whose limit it ever was: of a container, or
of a service, just those that are ours too. It needs no rights, where the kernel's log does, and
names no process. Source: Linux, cgroup-v2.rst (memory.events), cgroup-v1/memory.rst
(memory.oom_control).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from health.reading import Reading

_KEY = "oom_kill"
"""In all of these files."""

RAY_MONITOR = "RAY_memory_monitor_refresh_ms"
"""How often a raylet looks at how much memory is used, and ends processes for it before the kernel
would; 0: never. A variable of its environment."""


def read_oom_kills(
    at_s: float, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Reading]:
    """A reading with `oom_kills`, of the own cgroup; else of the machine, as of processes that are
    in no cgroup with a count. None where the kernel counts nothing.

    Args:
        at_s: now, on the monotonic clock.
        proc: the kernel's files on processes.
        cgroups: where control groups are mounted.
    """
    for file in _counters(proc, cgroups):
        count = _count(file)
        if count is not None:
            return [Reading(kind="memory", of=str(file), at_s=at_s, values={"oom_kills": count})]
    return []


def _counters(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Files that may have the count, the nearest first. In a container the own group may be mounted
    as if it were the root."""
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.oom_control"
        elif not controllers:
            root, name = cgroups, "memory.events"
        else:
            continue
        yield root / group.lstrip("/") / name
        yield root / name
    yield proc / "vmstat"


def _count(file: Path) -> float | None:
    for line in _read(file).splitlines():
        name, _, count = line.partition(" ")
        if name == _KEY:
            return float(count)
    return None


def _read(file: Path) -> str:
    """What it says; nothing where it is not there, or not for us to see."""
    try:
        return file.read_text()
    except OSError:
        return ""
