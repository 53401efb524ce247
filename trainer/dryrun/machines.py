"""What GPUs there are on a machine, and what they hold beside tensors. Pure.

The numbers beside tensors are a table, as nothing on a CPU can show them: each with its reason, all
of them on the safe side. No GPU has measured them yet.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30

CONTEXT_BYTES = 600_000_000
"""The CUDA context, the kernels' code and cuBLAS's workspaces."""

COMMUNICATOR_BYTES = 400_000_000
"""NCCL's buffers for one group: 4 MiB for each channel and direction, some 32 channels, and what it
needs over the network."""

UNUSABLE = 0.05
"""Share of the tensors' bytes that the caching allocator holds and cannot give: what is left of cut
blocks, and what waits for another stream."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of node."""

    name: str
    """As on the command line."""
    gpus: int
    """On each."""
    memory_bytes: int
    """Of one GPU, as torch reports it: less than its name says."""


_KINDS = (
    Machine(name="p4d", gpus=8, memory_bytes=int(39.4 * _GIB)),  # A100 40 GB
    Machine(name="p4de", gpus=8, memory_bytes=int(79.1 * _GIB)),  # A100 80 GB
    Machine(name="p5", gpus=8, memory_bytes=int(79.1 * _GIB)),  # H100 80 GB
    Machine(name="p5e", gpus=8, memory_bytes=int(139.7 * _GIB)),  # H200 141 GB
    Machine(name="p5en", gpus=8, memory_bytes=int(139.7 * _GIB)),  # H200 141 GB
)

MACHINES = {machine.name: machine for machine in _KINDS}
"""Instances of AWS by the first part of their name."""


def beside_tensors(peak_bytes: int, groups: int) -> int:
    """Bytes of a GPU that hold no tensor.

    Args:
        peak_bytes: of tensors.
        groups: process groups that the worker is in, of two or more.
    """
    return CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + int(UNUSABLE * peak_bytes)
