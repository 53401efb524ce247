"""Keeps a worker's threads on the CPUs beside its GPU: on a machine with two sockets, half of them
reach it, and its EFA devices, through the other one."""

from __future__ import annotations

import os
import re
from collections.abc import Set
from pathlib import Path


def plan_affinity(allowed: Set[int], online: Set[int], near: Set[int]) -> Set[int] | None:
    """The CPUs for a worker; None: those that it has.

    Args:
        allowed: where it may run now. Fewer than all: somebody has chosen them, and they stay.
        online: all CPUs of the machine.
        near: those beside its GPU; none, where the machine does not tell.
    """
    if allowed < online or not near & allowed or near >= allowed:
        return None
    return near & allowed


def stay_near(uuid: str, root: Path = Path("/")) -> Set[int] | None:
    """Binds the calling thread, and all that it starts from now on, to the CPUs beside a GPU.

    Args:
        uuid: of the GPU, as torch tells it.
        root: where the machine's files begin.

    Returns:
        The CPUs; None where nothing was changed.
    """
    chosen = plan_affinity(
        os.sched_getaffinity(0),
        parse_cpus(text_of(root / "sys/devices/system/cpu/online")),
        cpus_near(uuid, root),
    )
    if chosen is not None:
        os.sched_setaffinity(0, chosen)
    return chosen


def cpus_near(uuid: str, root: Path = Path("/")) -> Set[int]:
    """The CPUs of the NUMA node that a GPU hangs on; none, where the machine does not tell."""
    for file in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        if re.search(rf"^GPU UUID:\s*GPU-{re.escape(uuid)}\s*$", text_of(file), re.MULTILINE):
            device = root / "sys/bus/pci/devices" / file.parent.name.lower()
            return parse_cpus(text_of(device / "local_cpulist"))
    return frozenset()


def parse_cpus(text: str) -> Set[int]:
    """The kernel's lists of CPUs: `0-23,48-71`."""
    spans = (part.partition("-") for part in text.split(",") if part.strip())
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


def text_of(file: Path) -> str:
    """What is in a file of the kernel's; nothing where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
