"""Where each trainable local slice lies in one flat buffer: the gradients of a lane, and their sum.

The slices lie in the order in which backward finishes them, so that what is finished is always a
prefix. Those that another worker of the replica counts come last, so that the norm is over a prefix
too.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Set
from itertools import accumulate

import torch
from torch import nn

from trainer.buckets import plan_buckets
from trainer.parallel.apply import local_tensor
from trainer.parallel.backward import groups_in_backward_order


class FlatLayout:
    """See the module.

    Args:
        model: this worker's part, materialized.
        counted_elsewhere: names of the parameters that a worker before this one counts.
        bucket_bytes: the least and the most that are reduced at once.
    """

    def __init__(
        self, model: nn.Module, *, counted_elsewhere: Set[str], bucket_bytes: tuple[int, int]
    ) -> None:
        groups = groups_in_backward_order(model)
        order = {id(param): index for index, group in enumerate(groups) for param in group}
        placed = [
            (len(groups) if name in counted_elsewhere else order[id(param)], name, param)
            for name, param in model.named_parameters()
            if param.requires_grad
        ]
        placed.sort(key=lambda entry: entry[0])
        self.names = [name for _, name, _ in placed]
        """Of the parameters, in their order."""
        self.params = [param for _, _, param in placed]
        """The model's."""
        self.locals = [local_tensor(param) for param in self.params]
        """Their local slices. In the middle of a step FSDP2 shows whole parameters in the model's
        place of them."""
        self._counts = [local.numel() for local in self.locals]
        places, ends = [place for place, _, _ in placed], [0, *accumulate(self._counts)]
        self.group_params = [bisect(places, group) for group in range(len(groups) + 1)]
        """How many parameters there are up to the end of each group of backward; at last, all."""
        self.group_ends = [ends[params] for params in self.group_params]
        """How many numbers there are up to there."""
        self.own, self.count = self.group_ends[-2:]
        """How many numbers this worker counts; how many there are."""
        least, most = (size // torch.float32.itemsize for size in bucket_bytes)
        self.buckets = plan_buckets(self.group_ends, least=least, most=most)
        """Where each bucket ends."""

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat buffer of `count` numbers (or more), shaped like the local slices."""
        parts = flat[: self.count].split(self._counts)
        return [part.view(local.shape) for part, local in zip(parts, self.locals, strict=True)]
