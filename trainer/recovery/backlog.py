"""The committed steps that a newcomer must make up for, each with its reduced gradient on the host.

How many there will be is the network's to say: they come as long as the state is on its way. What
they may take is therefore bounded by what the host has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from trainer.backend.host_memory import HostMemory, host_memory
from trainer.recovery.staging import Stage, copy_to_host
from trainer.replication.step_commit import Commit

FREE_BYTES = 256 << 20
"""May be kept whatever the host has left: nothing beside a worker's own few GB. So a small model is
never measured, and a busy machine does not fail its heals."""

_COPYING_THREADS = 4
"""That copy a gradient: the peers wait for the newcomer in their next reduce until it is kept."""

_RESERVE_SHARE = 0.25
"""Of the host's memory, left to others. It is this much because the other newcomers on the host
keep a gradient at the same moment and none sees the others' in its measure, and because Ray kills
workers where 95% are in use."""


class Backlog:
    """Steps in their order, each with its gradient in host memory.

    Args:
        free_bytes: kept in any case.
        measure: tells what the host has left; asked before a step is kept, beyond `free_bytes`.
    """

    def __init__(
        self, *, free_bytes: int = FREE_BYTES, measure: Callable[[], HostMemory] = host_memory
    ) -> None:
        self._free_bytes, self._measure = free_bytes, measure
        self._kept: deque[tuple[Commit, torch.Tensor]] = deque()
        self._stages: list[Stage] = []
        self.bytes = 0
        """Of all gradients in it."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, commit: Commit, gradient: torch.Tensor) -> None:
        """Adds a step, with a copy of its gradient."""
        if not self._stages:
            self._stages = [Stage(gradient.device, number) for number in range(_COPYING_THREADS)]
        self._kept.append((commit, copy_to_host(gradient, self._stages)))
        self.bytes += gradient.nbytes

    def take_oldest(self) -> tuple[Commit, torch.Tensor]:
        """Removes the oldest step."""
        commit, gradient = self._kept.popleft()
        self.bytes -= gradient.nbytes
        return commit, gradient

    def clear(self) -> None:
        """Lets go of all."""
        self._kept.clear()
        self.bytes = 0

    def no_room(self, more_bytes: int) -> str | None:
        """Why the gradient of one more step, of `more_bytes`, cannot be kept; None: it can."""
        if self.bytes + more_bytes <= self._free_bytes:
            return None
        memory = self._measure()
        reserve = int(_RESERVE_SHARE * memory.total_bytes)
        if memory.available_bytes - more_bytes >= reserve:
            return None
        return (
            f"it keeps the gradients of {len(self)} steps in {_mib(self.bytes)}, the next one has "
            f"{_mib(more_bytes)}, and of its host's {_mib(memory.total_bytes)} of memory "
            f"{_mib(memory.available_bytes)} are available, of which {_mib(reserve)} stay free"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
