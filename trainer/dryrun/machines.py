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


def count_sharing(gpus: float, gpus_per_worker: float) -> int:
    """Workers that `gpus` of one node hold: Ray gives none parts of two.

    Of what is free Ray tells the sum alone. That is taken for whole GPUs and a part of one more:
    so it is where nobody else shares them, or on one GPU alone.

    Args:
        gpus: there, or free.
        gpus_per_worker: more than 0, 1 at most.
    """
    whole, part = divmod(gpus + 1e-9, 1)
    return int(whole) * int(1 / gpus_per_worker + 1e-9) + int(part / gpus_per_worker + 1e-9)


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
        """As workers see it that have a part of a GPU each: more GPUs, which are smaller."""
        return replace(
            self,
            gpus=count_sharing(self.gpus, gpus_per_worker),
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
