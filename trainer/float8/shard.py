"""A weight's shard that is rounded to 8 bits before the all-gather: half the bytes of bfloat16.

The scale of a whole weight is that of its largest number, which lies in any shard: an all-reduce of
the maximum, which is exact in any order. The shard is rounded to the dtype of the computation
first, so the 8 bits are those of a weight that is gathered in that dtype and then scaled: gathering
in 8 bits changes no bit of a run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from trainer.float8.scales import cast, largest, scale_of
from trainer.float8.weight import Float8Weight
from trainer.parallel.own_gather import OwnGather

_E4M3 = torch.float8_e4m3fn


class Float8Shard(OwnGather):
    """The shard of a weight of a `Float8Linear`. Every worker of the replica has as many rows."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        """What is gathered, and the scale's inverse. Called by all workers that share the
        weight."""
        shard = self.memory.to(policy.param_dtype or self.memory.dtype)
        amax = largest(shard, by_row=False).float()
        if mesh.size() > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        scale, inverse = scale_of(amax, _E4M3)
        return (cast(shard, scale, _E4M3),), inverse

    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor, ...],
        inverse: torch.Tensor,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight; where FSDP2 has it already, in `out`, only its scale is new."""
        (data8,) = gathered
        if out is None:
            return Float8Weight(data8, inverse, dtype), (data8,)
        weight: Any = out.to_local() if isinstance(out, DTensor) else out
        if inverse.is_cuda:
            # FSDP2 lets go of it after this, but took its memory on the stream that it gathers on.
            inverse.record_stream(torch.cuda.current_stream())
        # A compiled forward keeps this very tensor for backward; the value is the same by then.
        with _unsafe_preserve_version_counter(weight.scale_inverse):
            weight.scale_inverse.copy_(inverse)
        return None
