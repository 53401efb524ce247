"""Weights with an all-gather of their own (`OwnGather`) that FSDP2 gathers at once.

FSDP2 asks each of them by itself, one after the other. What they have to exchange before takes one
collective for all: the first that is asked prepares the others' answers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainer.parallel.own_gather import OwnGather
from trainer.parallel.param_group import param_group

Answer = TypeVar("Answer")


def gather_together(module: nn.Module) -> None:
    """Gives the layers whose weights FSDP2 gathers with those of `module`, and in their own way,
    their `together`.

    Args:
        module: fully sharded over several ranks.
    """
    group = param_group(module)
    own = [
        param
        for param in (group.fsdp_params if group else ())
        if isinstance(param._sharded_local_tensor, OwnGather)
    ]
    together = Together(group, own)
    for param in own:
        param._module_info.module.together = together


class Together:
    """The weights of a group that are gathered in their own way, one for each layer. All workers
    that share them call its methods alike, on the stream that FSDP2 gathers on.

    Args:
        group: FSDP2's.
        params: FSDP2's, in the order in which it asks them.
    """

    def __init__(self, group: Any, params: list[Any]) -> None:
        self._group, self._params = group, params
        self._layers: list[nn.Module] = [param._module_info.module for param in params]
        self._answers: dict[nn.Module, Any] = {}

    def answer(
        self, layer: nn.Module, prepare: Callable[[list[torch.Tensor]], list[Answer]]
    ) -> Answer:
        """That of the layer's weight. Each gather begins with the first one, which has all answers
        made anew: those that a gather which broke off has left are never used.

        Args:
            layer: that is asked.
            prepare: the answers of all shards.
        """
        if layer is self._layers[0]:
            shards = [param._sharded_local_tensor.memory for param in self._params]
            self._answers = dict(zip(self._layers, prepare(shards), strict=True))
        answer: Answer = self._answers.pop(layer)
        return answer

    def maxima(self, own: torch.Tensor, workers: dist.ProcessGroup) -> torch.Tensor:
        """The largest over all workers of each number, gathered as weights are: flat, or in two
        levels. An all-reduce would take a ring twice as long.

        Args:
            own: this worker's; one dimension.
            workers: that share the weights.
        """
        count = len(own)
        everybodys = own.new_empty(workers.size() * count)
        mine = everybodys[workers.rank() * count :][:count]
        mine.copy_(own)
        self._group._all_gather_comm(
            output_tensor=everybodys, input_tensor=mine, group=workers, async_op=False
        )
        return everybodys.view(-1, count).amax(0)
