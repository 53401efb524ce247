"""What becomes of a block's parameters between its forward and its backward, in FSDP2's terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from trainer.parallel.mesh import ReplicaMesh


@contextmanager
def resharded(mesh: ReplicaMesh, reshard: bool) -> Iterator[bool | int]:
    """What `fully_shard` gets as `reshard_after_forward` in the block.

    For a number of workers it would make groups of its own for each module, under names that it
    shares with other formations. In the block it takes the replica's.

    Args:
        mesh: the replica's.
        reshard: whether parameters are let go of.
    """
    cut = mesh.regather
    if cut is None:
        yield reshard
        return
    info = HSDPMeshInfo(cut, shard_mesh_dim=1, replicate_mesh_dim=0)

    def take_ours(*_: Any) -> HSDPMeshInfo:
        return info

    with patch.object(_fully_shard, "_get_post_forward_mesh_info", take_ours):
        yield cut.size(1)
