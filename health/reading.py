"""What instruments show, in one form: names and numbers, with what they belong to.

Instruments are `gpu.py`, `xid_events.py`, `efa.py`, `nic.py`, `mounts.py`, `storage.py`,
`oom_kills.py` and `worker_load.py`. They only read; `judgement.py` says what follows. So what was
recorded on one machine can be judged on another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gpu", "xid", "efa", "nic", "mount", "storage", "memory", "worker"]
"""What was read."""

UNREACHED = "index "
"""Before NVML's number of a GPU, what one is called that NVML has given no hold of so far."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at one thing."""

    kind: Kind
    """What it is."""
    of: str
    """Which one: a GPU's bus address (`UNREACHED` with its number where that is not known), a
    device with its port, an interface, a mount point, the file of a count, a worker's name."""
    at_s: float
    """When, on the monotonic clock."""
    values: Mapping[str, float]
    """What was shown, by name; what cannot be had is left out."""
    pids: tuple[int, ...] = ()
    """Processes that use it, where that is known."""

    def concerns(self, pid: int) -> bool:
        """Whether it says anything of a process: not where it is about others alone."""
        return not self.pids or pid in self.pids
