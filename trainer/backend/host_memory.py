"""How much memory the host has left for this process's allocations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What there is and what is left of it, for all processes that share it."""

    available_bytes: int
    """What can be had without swapping; what the page cache would give back counts."""
    total_bytes: int
    """All of it."""


def host_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> HostMemory:
    """The machine's memory, or the container's where that has a limit.

    Args:
        meminfo: the kernel's account of the machine.
        cgroup: of this container (version 2).

    Source: proc_meminfo(5), MemAvailable; the kernel's cgroup-v2.rst, "Memory Interface Files".
    """
    machine = _numbers(meminfo)
    available, total = machine["MemAvailable:"] * 1024, machine["MemTotal:"] * 1024
    limit = _read(cgroup / "memory.max")
    if limit.isdecimal():
        cache = _numbers(cgroup / "memory.stat").get("inactive_file", 0)
        left = int(limit) - int(_read(cgroup / "memory.current")) + cache
        available, total = min(available, left), min(total, int(limit))
    return HostMemory(available_bytes=max(0, available), total_bytes=total)


def _read(path: Path) -> str:
    """The content; nothing where there is no such file."""
    return path.read_text().strip() if path.exists() else ""


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
