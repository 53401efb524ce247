"""Float32 gradients of one parameter group whose parameters are bfloat16.

FSDP2 rounds what its reduce-scatter gives to the parameters' type, and would add up micro-batches
in that. So they are added up here, in float32, as they come from the reduce-scatter; what FSDP2
then sets as the parameters' own gradients is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress

import torch
from torch import nn

from trainer.parallel.apply import local_tensor


class WideGradients:
    """The gradients of one group, over the micro-batches of a lane.

    Args:
        params: the group's, in the order in which FSDP2 lays out their gradients.
        room: numbers that each of them has there.
    """

    def __init__(self, params: Sequence[nn.Parameter], room: Sequence[int]) -> None:
        self._params, self._room = params, room
        self._part: torch.Tensor | None = None
        self._empty = True
        self._few: torch.Tensor | None = None
        self._is_checked = False

    def begin(self, part: torch.Tensor) -> None:
        """A lane begins, whose gradients go to `part`: flat, and as yet of any content."""
        self._part, self._empty = part, True

    def add(self, reduced: torch.Tensor, *, in_place: bool) -> None:
        """Adds what the reduce-scatter of a micro-batch gave, before FSDP2 makes gradients of it.

        Args:
            reduced: flat; of all parameters, or of those that had a part in the loss.
            in_place: it is in the lane's memory already.
        """
        if self._part is None:  # of no lane: a micro-batch that only has the blocks compiled
            return
        if in_place:
            self._empty = False
        elif reduced.numel() == self._part.numel():
            self._add(self._part, reduced)
            self._empty = False
        else:
            self._few = reduced  # of whom, shows in the gradients that FSDP2 sets

    def drop(self) -> None:
        """FSDP2 has set gradients of its own.

        Raises:
            AssertionError: they are there in another order than ours.
        """
        there = [param.grad is not None for param in self._params]
        if not self._is_checked:
            self._check_order(there)
        if self._few is not None and self._part is not None:
            self._add_few(self._part, self._few, there)
            self._few = None
        for param in self._params:
            param.grad = None

    def finish(self) -> None:
        """The lane has had its last micro-batch. A group without a part in any loss has zeros."""
        if self._part is not None and self._empty:
            self._part.zero_()

    def _add(self, into: torch.Tensor, reduced: torch.Tensor) -> None:
        if self._empty:
            into.copy_(reduced)
        else:
            into.add_(reduced)

    def _add_few(self, into: torch.Tensor, reduced: torch.Tensor, there: Sequence[bool]) -> None:
        if reduced.is_cuda:
            reduced.record_stream(torch.cuda.current_stream())
        self.finish()
        self._empty = False
        sizes = [*compress(self._room, there)]
        places = [*compress(into.split(self._room), there)]
        torch._foreach_add_(places, list(reduced.split(sizes)))

    def _check_order(self, there: Sequence[bool]) -> None:
        sizes, params = [*compress(self._room, there)], compress(self._params, there)
        found = [local_tensor(p.grad).storage_offset() for p in params if p.grad is not None]
        if found != [0, *accumulate(sizes)][:-1]:
            raise AssertionError(
                f"FSDP2 of torch {torch.__version__} lays out a group's gradients in another order "
                "than trainer/parallel/backward.py"
            )
        self._is_checked = True
