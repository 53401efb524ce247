"""Where an exception comes from: told by its type and by what stands, never by its message."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from trainer.backend.groups import replica_connections
from trainer.errors import GroupError

Origin = Literal["group", "memory", "device", "code"]
"""A process group or its rendezvous; memory that ran out; the GPU or its driver; the code."""


def origin_of(error: BaseException) -> Origin:
    """What an exception of this worker's step came from. Called while its replica's group stands.

    Gloo raises bare RuntimeErrors, as users do; but when one of its collectives fails, or a peer is
    gone, a connection of the group is closed.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "memory"
    if isinstance(error, GroupError | dist.DistError):
        return "group"
    if isinstance(error, torch.AcceleratorError):
        return "device"
    if isinstance(error, RuntimeError) and replica_connections().lost():
        return "group"
    return "code"
