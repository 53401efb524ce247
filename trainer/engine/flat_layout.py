"""Where each trainable local slice lies in one flat buffer: the gradients of a lane, and their sum.

The slices lie in the order in which backward finishes them, so that what is finished is always a
prefix, and within a parameter group as FSDP2 lays out its gradients, so that its reduce-scatter can
write them there: each parameter has the room of its longest slice over the shard ranks, that of
rank 0. What a shorter slice leaves of it is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from trainer.parallel.apply import local_tensor
from trainer.parallel.backward import groups_in_backward_order
from trainer.replication.buckets import MERGED, plan_buckets


class FlatLayout:
    """The places of all trainable local slices in one flat buffer.

    Args:
        model: this worker's part, materialized.
        room: numbers to keep for the local slice of each parameter, by name: those of shard rank 0.
        counted_elsewhere: names of the parameters that a worker before this one counts.
        bucket_bytes: the most that are reduced at once.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        room: Mapping[str, int],
        counted_elsewhere: Set[str],
        bucket_bytes: int,
    ) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        groups = groups_in_backward_order(model)
        self.params = [param for group in groups for param in group]
        """The model's, in their order here."""
        self.names = [names[id(param)] for param in self.params]
        """Theirs."""
        self.locals = [local_tensor(param) for param in self.params]
        """Their local slices. In the middle of a step FSDP2 shows whole parameters in the model's
        place of them."""
        self._room = [room[name] for name in self.names]
        self.starts = ends = [0, *accumulate(self._room)]
        """Where the slice of each parameter begins, and where the last one's room ends."""
        self.count = ends[-1]
        """How many numbers there are."""
        self.group_params = [0, *accumulate(map(len, groups))]
        """Where the parameters of each group of backward end, 0 first."""
        self.group_ends = [ends[params] for params in self.group_params]
        """Where their numbers end, 0 first."""
        own = [
            (start, end)
            for name, (start, end) in zip(self.names, pairwise(ends), strict=True)
            if name not in counted_elsewhere
        ]
        self.own = _joined(own)
        """The ranges that this worker counts."""
        most = bucket_bytes // torch.float32.itemsize
        self.buckets = plan_buckets(self.group_ends, least=most // MERGED, most=most)
        """Where each bucket ends."""

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat buffer of `count` numbers (or more), shaped like the local slices."""
        return self._views(flat, 0, len(self.locals))

    def group_views(self, flat: torch.Tensor, group: int) -> list[torch.Tensor]:
        """As `views`, of one group's slices."""
        return self._views(flat, *self.group_params[group : group + 2])

    def _views(self, flat: torch.Tensor, first: int, end: int) -> list[torch.Tensor]:
        return [
            flat[start : start + local.numel()].view(local.shape)
            for start, local in zip(self.starts[first:end], self.locals[first:end], strict=True)
        ]

    def group_memories(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each group's part of a flat buffer, as a tensor at the start of a storage of its own:
        FSDP2 takes offsets from there."""
        return [from_dlpack(flat[start:end]) for start, end in pairwise(self.group_ends)]


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rising ranges, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
