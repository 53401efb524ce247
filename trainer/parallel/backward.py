"""Tells, while a backward runs, which FSDP2 parameter groups have their final gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def groups_in_backward_order(model: nn.Module) -> list[list[nn.Parameter]]:
    """The trainable parameters of each FSDP module, the last layer first and the root last."""
    return [[p for p in _own_parameters(m) if p.requires_grad] for m in _watched(model)]


def _watched(model: nn.Module) -> list[nn.Module]:
    """FSDP modules with trainable parameters: only those get gradients, and hooks."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [m for m in modules[::-1] if any(p.requires_grad for p in _own_parameters(m))]


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of `module` but not of an FSDP module inside it."""
    inner = {
        id(param)
        for child in module.modules()
        if child is not module and isinstance(child, FSDPModule)
        for param in child.parameters()
    }
    return [param for param in module.parameters() if id(param) not in inner]


class BackwardWatch:
    """Follows the groups of `groups_in_backward_order` through the backward of each micro-batch.

    FSDP calls the all-reduce hook of a group after its reduce-scatter, before it sets the
    gradients: those are there in the next hook, or after the backward. A module that the forward
    went through several times is finished with the last of as many hooks. Where that never comes,
    because a call took no part in the loss, the group and those after it are finished by the end of
    the backward, at the latest.

    Args:
        model: the whole model; its modules' all-reduce hooks are taken.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = _watched(model)
        self._due = [0] * len(modules)
        self._done = [False] * len(modules)
        self._finished = 0
        self._finish: Callable[[int], None] | None = None
        self._running = False
        for index, module in enumerate(modules):
            module.register_forward_hook(partial(self._forward, index))
            cast(FSDPModule, module).set_all_reduce_hook(partial(self._reduced, index))

    @contextmanager
    def backward(self, finish: Callable[[int], None] | None = None) -> Iterator[None]:
        """Round the backward of one micro-batch.

        Args:
            finish: called within backward with the number of groups, from the first on, whose
                gradients are final. On CUDA it is called on the stream that they come from.
        """
        self._finish, self._running = finish, True
        try:
            yield
        finally:
            self._due, self._done = [0] * len(self._due), [False] * len(self._due)
            self._finished, self._finish, self._running = 0, None, False

    def _forward(self, index: int, module: nn.Module, *_: Any) -> None:
        if module.training and not self._running:  # else an evaluation, or recomputed activations
            self._due[index] += 1

    def _reduced(self, index: int, reduced: torch.Tensor) -> None:
        if reduced.is_cuda:
            # FSDP2 adds it to the gradient on this stream after the hook, and lets go of it, but
            # took its memory on another one.
            reduced.record_stream(torch.cuda.current_stream())
        before = self._finished
        while self._finished < len(self._done) and self._done[self._finished]:
            self._finished += 1
        if self._finish is not None and self._finished > before:
            self._finish(self._finished)
        self._due[index] -= 1
        self._done[index] = self._due[index] == 0
