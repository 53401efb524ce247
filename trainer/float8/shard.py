"""A weight's shard that is rounded to 8 bits before the all-gather: half the bytes of bfloat16.

The scale of a whole weight is that of its largest number, which lies in any shard: the workers tell
each other their shards' maxima, for all weights that FSDP2 gathers at once in one vector. The shard
is rounded to the dtype of the computation first, so the 8 bits are those of a weight that is
gathered in that dtype and then scaled: gathering in 8 bits changes no bit of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from trainer.float8.scales import cast, largest, scale_of
from trainer.float8.weight import Float8Weight
from trainer.parallel.own_gather import OwnGather

_E4M3 = torch.float8_e4m3fn

_Answer = tuple[tuple[torch.Tensor], torch.Tensor]
"""What is gathered of a shard, and the scale's inverse."""


class Float8Shard(OwnGather):
    """The shard of a weight of a `Float8Linear`. Every worker of the replica has as many rows."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: Any,
        policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        """What is gathered, and the scale's inverse. Called by all workers that share the weight,
        for all weights that are gathered at once.

        Args:
            mesh: the workers.
            outer_size: the whole weight's.
            outer_stride: the whole weight's.
            module: the `Float8Linear`.
            policy: has the dtype of the computation.
        """
        if mesh.size() == 1:  # each by itself: all that are whole here would take memory at once
            return _answers([self.memory], policy, lambda own: own)[0]
        together, workers = module.together, mesh.get_group()

        def prepare(shards: list[torch.Tensor]) -> list[_Answer]:
            return _answers(shards, policy, lambda own: together.maxima(own, workers))

        answer: _Answer = together.answer(module, prepare)
        return answer

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
        if inverse.is_cuda:
            # FSDP2 lets go of it after this, but took its memory on the stream that it gathers on.
            inverse.record_stream(torch.cuda.current_stream())
        if out is None:  # a copy: an address of its own, as a kernel may want it aligned
            return Float8Weight(data8, inverse.clone(), dtype), (data8,)
        weight: Any = out.to_local() if isinstance(out, DTensor) else out
        # A compiled forward keeps this very tensor for backward; the value is the same by then.
        with _unsafe_preserve_version_counter(weight.scale_inverse):
            weight.scale_inverse.copy_(inverse)
        return None


def _answers(
    shards: list[torch.Tensor],
    policy: MixedPrecisionPolicy,
    maxima: Callable[[torch.Tensor], torch.Tensor],
) -> list[_Answer]:
    """Those of weights that are gathered at once.

    Args:
        shards: this worker's, of each weight.
        policy: has the dtype of the computation.
        maxima: from the shards' largest magnitudes, (N,), to the whole weights'.
    """
    dtype = policy.param_dtype or shards[0].dtype
    # Rounding keeps the order of numbers: this is the largest of the rounded shard.
    own = torch.stack([largest(shard, by_row=False) for shard in shards]).to(dtype).float()
    return [
        ((cast(shard.to(dtype), scale, _E4M3),), inverse)
        for shard, scale, inverse in zip(shards, *scale_of(maxima(own), _E4M3), strict=True)
    ]
