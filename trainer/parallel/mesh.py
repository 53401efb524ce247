"""A replica's process group as meshes, one for each use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class ReplicaMesh:
    """A replica's group along its dimensions. Each is a 1-D mesh."""

    fsdp: DeviceMesh
    """What FSDP2 shards over: shard and the others together."""
    tensor: DeviceMesh | None
    """Tensor peers, of one root mesh with `fsdp`, as DTensor wants it; None: there are none."""
    others: Mapping[str, DeviceMesh]
    """The peers along each dimension beside shard and tensor, by its name."""
    regather: DeviceMesh | None = None
    """2-D: `fsdp` cut into neighbours, over which parameters lie from a block's forward to its
    backward; None where there is no such cut. The one mesh here that is not 1-D."""
