"""The streams of a process, one for each kind of work beside the computing.

torch has 32 streams of a device and deals them out in turn: it never takes one back, and the 33rd
is the first again. With a new one for each heal and save, a few faults later copies would wait on
each other's. Still, each communicator of NCCL takes one of the 32, too, and after many regroups one
may lie on a stream of these: see docs/decisions/045.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def stream_for(work: str, device: torch.device, priority: int = 0) -> Any:
    """The stream of a kind of work, always the same. On a CPU, where all is done at once, one that
    does nothing.

    Args:
        work: its name.
        device: where.
        priority: torch has 32 streams of each. Those of -2 neither c10d (0 and -3) nor FSDP2 (-1)
            takes: for what may wait for nobody else's.
    """
    if device.type == "cuda":
        return torch.cuda.Stream(device, priority=priority)
    return torch.cpu.Stream()


def timed_mark() -> Any:
    """The moment that CUDA's current stream reaches what is queued next, to be told from others."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
