"""What tests of process groups run on: the one place that chooses a device and a backend.

    GLOO           CPU                           any machine
    GLOO_ON_CUDA   CUDA tensors, over Gloo       a GPU, shared by all processes
    NCCL           CUDA tensors, over NCCL       a GPU, shared where there are fewer than ranks

The backend is that of the groups across replicas. Inside a replica the trainer takes the device's
own, so a replica of one rank is on NCCL in the second row too: two of them on one GPU are two
communicators of one rank each, which NCCL allows.

NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"). Where ranks must share
one, each names a host of its own (`NCCL_HOSTID`), and they speak over sockets. NCCL's authors do
not support it (NVIDIA/nccl issue 418): it shows what happens, not how long it takes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from trainer.backend.groups import Device
from trainer.backend.rendezvous import Rendezvous
from trainer.replication.replicas import CrossGroup

_HELD_UP_CYCLES = 100_000_000
"""Some 50 ms of an H100."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A device, and what carries collectives across replicas."""

    device: Device
    """Where tensors are."""
    backend: Literal["gloo", "nccl"]
    """Of the groups across replicas."""

    def enter(self, place: int, ranks: int) -> None:
        """Called first in a process that has `place` among so many ranks, before CUDA starts."""
        torch.set_num_threads(1)
        if self.device == "cuda":
            check_fork()
        if self.backend == "gloo":
            return
        gpus = torch.cuda.device_count()  # asks the driver's library; CUDA does not start
        if gpus < ranks:
            os.environ.update(share_a_gpu(place))
        else:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[place] if shown else str(place)

    def hold_up(self) -> None:
        """Keeps the current stream busy for a while: what does not come after it shows. A CPU has
        no streams."""
        if self.device == "cuda":
            torch.cuda._sleep(_HELD_UP_CYCLES)

    @property
    def group_device(self) -> Device:
        """The device for which the trainer makes groups of this backend."""
        return "cuda" if self.backend == "nccl" else "cpu"


GLOO = Fabric(device="cpu", backend="gloo")
GLOO_ON_CUDA = Fabric(device="cuda", backend="gloo")
NCCL = Fabric(device="cuda", backend="nccl")


class FabricGroup(CrossGroup):
    """A cross group of a fabric: the trainer's own would take NCCL for every CUDA tensor."""

    def __init__(self, fabric: Fabric, meet: Rendezvous, prefix: str, **options: Any) -> None:
        self._fabric = fabric
        super().__init__(meet, prefix, device=fabric.device, **options)

    def _join(self, rendezvous: Rendezvous, prefix: str, device: Device) -> None:
        super()._join(rendezvous, prefix, self._fabric.group_device)

    @property
    def _on_nccl(self) -> bool:
        return self._fabric.backend == "nccl"


def check_fork() -> None:
    """Raises RuntimeError where no process that was forked can use CUDA."""
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            "CUDA was started in the process that all others are forked from, by what an import "
            "there does (torchao's, in 2026): take that package off the path"
        )


def share_a_gpu(place: int) -> dict[str, str]:
    """Environment of a rank of NCCL on a GPU that other ranks are on, too."""
    return {
        "NCCL_HOSTID": f"rank-{place}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def on(*fabrics: Fabric) -> pytest.MarkDecorator:
    """Runs a test on each of `fabrics`, skipping those on a GPU where there is none."""
    return pytest.mark.parametrize(
        "fabric",
        [
            pytest.param(
                fabric,
                id=f"{fabric.backend}-{fabric.device}",
                marks=[] if fabric == GLOO else pytest.mark.gpu,
            )
            for fabric in fabrics
        ],
    )
