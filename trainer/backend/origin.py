"""Where an exception comes from: told by its type, its code and what stands, never by its
message."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from trainer.backend.groups import replica_connections
from trainer.errors import (
    CompilerFailed,
    DataStorageError,
    GroupError,
    NetworkError,
    StorageNotSeenError,
)

Origin = Literal[
    "group", "memory", "device", "ecc", "assert", "compiler", "network", "storage", "data", "code"
]
"""A process group or its rendezvous; memory that ran out; the GPU or its driver; the GPU's memory,
which has lost bits; a check in a kernel; torch's compiler; a machine whose EFA is not taken; one
that does not see the run's storage; the storage of samples, which falters; the code."""

_OF_CUDA: dict[int | None, Origin] = {2: "memory", 214: "ecc", 710: "assert"}
"""cudaError_t: cudaErrorMemoryAllocation, cudaErrorECCUncorrectable, cudaErrorAssert. All others
are the device's."""


def origin_of(error: BaseException) -> Origin:
    """What an exception of this worker's step came from. Called while its replica's group stands.

    Gloo raises bare RuntimeErrors, as users do; but when one of its collectives fails, or a peer is
    gone, a connection of the group is closed. NCCL, cuBLAS and others raise them where the GPU has
    failed; but since then it answers everything with its error. A type derived from RuntimeError is
    the code's, and so is a bare one for memory that CUDA's allocator has not been asked for.
    """
    if isinstance(error, NetworkError):
        return "network"
    if isinstance(error, StorageNotSeenError):
        return "storage"
    if isinstance(error, DataStorageError):
        return "data"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "memory"
    if isinstance(error, torch.AcceleratorError):
        return _OF_CUDA.get(_code_of(error), "device")
    lasting = lasting_device_error()
    if lasting is not None:
        return _OF_CUDA.get(_code_of(lasting), "device")
    if isinstance(error, CompilerFailed):
        return "compiler"
    if isinstance(error, GroupError | dist.DistError):
        return "group"
    if type(error) is RuntimeError and replica_connections().lost():
        return "group"
    return "code"


def lasting_device_error() -> torch.AcceleratorError | None:
    """The error that this process's GPU answers everything with; None where it works, or CUDA has
    not been started. Waits for nothing that is queued there."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.current_stream().query()
    except torch.AcceleratorError as error:
        return error
    return None


def _code_of(error: torch.AcceleratorError) -> int | None:
    """The cudaError_t, which torch sets on what it raises itself."""
    return getattr(error, "error_code", None)
