"""What GPUs there are on a machine, and what they hold beside tensors. Pure.

The numbers beside tensors are a table, as nothing on a CPU can show them: each with its reason, all
of them on the safe side. No GPU has measured them yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    host_memory_bytes: int | None = None
    """Of the machine itself; None: unknown."""

    def shared(self, gpus_per_worker: float) -> Machine:
        """As workers see it that have a part of a GPU each: more GPUs, which are smaller. Ray gives
        no worker parts of two."""
        return replace(
            self,
            gpus=self.gpus * int(1 / gpus_per_worker + 1e-9),
            memory_bytes=int(self.memory_bytes * gpus_per_worker),
        )


def _machine(name: str, gpu_gib: float, host_gib: int) -> Machine:
    gpu_bytes, host_bytes = int(gpu_gib * _GIB), host_gib * _GIB
    return Machine(name=name, gpus=8, memory_bytes=gpu_bytes, host_memory_bytes=host_bytes)


_KINDS = (
    _machine("p4d", 39.4, 1152),  # 8 A100 40 GB
    _machine("p4de", 79.1, 1152),  # 8 A100 80 GB
    _machine("p5", 79.1, 2048),  # 8 H100 80 GB
    _machine("p5e", 139.7, 2048),  # 8 H200 141 GB
    _machine("p5en", 139.7, 2048),  # 8 H200 141 GB
    _machine("p6-b200", 178.3, 2048),  # 8 B200 180 GB
    _machine("p6-b300", 267.6, 4096),  # 8 B300 268 GB
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
