"""What tests of process groups run on: the one place that chooses a device and a backend.

    GLOO           CPU                           any machine
    GLOO_ON_CUDA   CUDA tensors, over Gloo       a GPU, shared by all processes
    NCCL           CUDA tensors, over NCCL       a GPU for each rank

The backend is that of the groups across replicas. Inside a replica the trainer takes the device's
own, so a replica of one rank is on NCCL in the second row too: two of them on one GPU are two
communicators of one rank each, which NCCL allows.
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

SHARE_ONE_GPU = "NCCL_TESTS_SHARE_ONE_GPU"
"""Environment variable: several ranks of NCCL are tried on one GPU, each under a host's name of its
own. NCCL's authors do not support it (NVIDIA/nccl issue 418)."""

_HELD_UP_CYCLES = 100_000_000
"""Some 50 ms of an H100."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A device, and what carries collectives across replicas."""

    device: Device
    """Where tensors are."""
    backend: Literal["gloo", "nccl"]
    """Of the groups across replicas."""

    def enter(self, place: int) -> None:
        """Called first in a process that has `place` among the ranks, before CUDA starts."""
        torch.set_num_threads(1)
        if self.backend == "gloo":
            return
        if SHARE_ONE_GPU in os.environ:
            apart = {"NCCL_HOSTID": f"rank-{place}", "NCCL_SOCKET_IFNAME": "lo"}
            os.environ.update(apart, NCCL_IB_DISABLE="1")
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


def on(*fabrics: Fabric, ranks: int) -> pytest.MarkDecorator:
    """Runs a test on each of `fabrics`, skipping those that this machine has too few GPUs for."""
    return pytest.mark.parametrize(
        "fabric",
        [
            pytest.param(
                fabric,
                id=f"{fabric.backend}-{fabric.device}",
                marks=[] if fabric == GLOO else pytest.mark.gpu(ranks if fabric == NCCL else 1),
            )
            for fabric in fabrics
        ],
    )


def lacks_gpus(needed: int = 1) -> str | None:
    """Why a test that needs so many GPUs is skipped here; None where it is not."""
    here = torch.cuda.device_count()
    if here >= needed or (here and SHARE_ONE_GPU in os.environ):
        return None
    if here == 0:
        return "needs a CUDA device"
    return (
        f"needs {needed} GPUs, here is {here}: NCCL refuses two ranks on one device (Duplicate GPU "
        f"detected). {SHARE_ONE_GPU}=1 tries it with made-up hosts"
    )
