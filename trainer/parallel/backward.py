"""Tells, while a backward runs, which FSDP2 parameter groups have their final gradient, and has
them put where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.parallel.lone_gradients import Pending, add_in_place
from trainer.parallel.param_group import param_group
from trainer.parallel.two_level import TwoLevels
from trainer.parallel.wide_sums import AddTo, add_wide


def groups_in_backward_order(model: nn.Module) -> list[list[nn.Parameter]]:
    """The trainable parameters of each FSDP module, the last layer first and the root last. Within
    a group they come in the order in which FSDP2 lays out their gradients."""
    return [[p for p in _own_parameters(m) if p.requires_grad] for m in _watched(model)]


def _watched(model: nn.Module) -> list[nn.Module]:
    """FSDP modules with trainable parameters: only those get gradients, and hooks."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [m for m in modules[::-1] if any(p.requires_grad for p in _own_parameters(m))]


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of `module` but not of an FSDP module inside it: a module's own after those of its
    children, as in FSDP2."""
    inner = {
        id(param)
        for child in module.modules()
        if child is not module and isinstance(child, FSDPModule)
        for param in child.parameters()
    }
    found: dict[int, nn.Parameter] = {}

    def visit(inside: nn.Module) -> None:
        for child in inside.children():
            if not isinstance(child, FSDPModule):
                visit(child)
        for param in inside.parameters(recurse=False):
            if id(param) not in inner:
                found.setdefault(id(param), param)

    visit(module)
    return [*found.values()]


class _GroupMemory:
    """The reduce-scatter of one group (torch's `ReduceScatter` interface), with memory of ours for
    its result.

    FSDP2 asks for the input and then for the output, which gets ours, but where some parameters
    have no gradient: then it is smaller. Over one rank it asks only then (`lone_gradients`).
    """

    def __init__(self, levels: TwoLevels | None) -> None:
        self._levels = levels
        self.offered: torch.Tensor | None = None
        """For the next reduce-scatter's result."""
        self.count: int | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for a flat buffer."""
        ours, (count,) = self.offered, size
        if ours is not None and ours.dtype == dtype and count == ours.numel():
            return ours
        return torch.empty(size, dtype=dtype, device=device)

    def offer(self, part: torch.Tensor | None) -> None:
        """Gives memory for the next reduce-scatter, or takes it back."""
        self.offered = part
        if part is not None:
            self.count = part.numel()

    def check(self, reduced: torch.Tensor) -> None:
        """Raises RuntimeError where FSDP2 left out parameters without a gradient here: another
        rank may have left out others, and the sums would be of different ones."""
        if self.count is not None and reduced.numel() != self.count:
            raise RuntimeError(
                "some parameters had no part in the loss, and FSDP2 of torch "
                f"{torch.__version__} would add up those of one rank and others of another. Use "
                "torch 2.13 or newer, parameters that all have a part, or shard = 1 and context = 1"
            )

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any
    ) -> dist.Work | None:
        """The collective; `options` are its group, its operation (a sum), and whether to wait."""
        if self._levels is None:
            return flat_reduce_scatter(output_tensor, input_tensor, **options)
        self._levels.reduce_scatter(output_tensor, input_tensor, options["group"])
        return None


flat_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Under its name since torch 2.13, or the one before."""


class BackwardWatch:
    """Follows the groups of `groups_in_backward_order` through the backward of each micro-batch.

    FSDP calls the all-reduce hook of a group after its reduce-scatter, before it sets the
    gradients: those are there in the next hook, or after the backward. A module that the forward
    went through several times is finished with the last of as many hooks. Where that never comes,
    because a call took no part in the loss, the group and those after it are finished by the end of
    the backward, at the latest.

    Gradients are float32, as they come from the reduce-scatter, and micro-batches are added up in
    that, also where the parameters are narrower: by itself FSDP2 would round to the parameters'
    type. A gradient that it rounds all the same is refused by torch.

    Args:
        model: the whole model; its modules' all-reduce hooks and reduce-scatters are taken.
        ranks: that it is sharded over.
        levels: over which gradients are scattered; None: in one.
        add: adds a later micro-batch's, where there is nothing to scatter.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        levels: TwoLevels | None = None,
        add: AddTo = add_wide,
    ) -> None:
        modules = _watched(model)
        self._groups = [param_group(module) for module in modules]
        self._memories = [_GroupMemory(levels) for _ in modules]
        self._ranks, self._pending = ranks, Pending()
        self._due = [0] * len(modules)
        self._done = [False] * len(modules)
        self._finished = 0
        self._finish: Callable[[int], None] | None = None
        self._running = False
        for index, module in enumerate(modules):
            module.register_forward_hook(partial(self._forward, index))
            fsdp = cast(FSDPModule, module)
            fsdp.set_all_reduce_hook(partial(self._reduced, index))
            fsdp.set_custom_reduce_scatter(cast(Any, self._memories[index]))
            # Ranks may use different parameters: zeros for the others. Not before torch 2.13.
            if ranks > 1 and hasattr(fsdp, "set_reduce_scatter_unused_params"):
                fsdp.set_reduce_scatter_unused_params(True, recurse=False)
            group, memory = self._groups[index], self._memories[index]
            if ranks == 1 and group is not None:
                add_in_place(group, memory, partial(self._advance, index), self._pending, add)
        for param in model.parameters():
            if param.requires_grad:
                cast(Any, param).grad_dtype = torch.float32

    def offer(self, parts: Sequence[torch.Tensor]) -> None:
        """Gives memory for each group's gradients, which are None, until the next call. The
        next ones of the group are put there, if all its parameters have one, and later ones are
        added to them.

        Args:
            parts: flat, each at the start of its storage, with as many float32 numbers as the
                group's padded slices have.
        """
        for memory, part in zip(self._memories, parts, strict=True):
            memory.offer(part)

    @contextmanager
    def backward(self, finish: Callable[[int], None] | None = None) -> Iterator[None]:
        """Round the backward of one micro-batch.

        Args:
            finish: called within backward with the number of groups, from the first on, whose
                gradients are final. On CUDA it is called on the stream that they come from.
        """
        self._finish, self._running = finish, True
        for group in self._groups:
            if group is not None:  # the forward before the first backward has set the parameters'
                group._orig_dtype = torch.float32
        try:
            yield
        finally:
            self._pending.end()
            self._due, self._done = [0] * len(self._due), [False] * len(self._due)
            self._finished, self._finish, self._running = 0, None, False

    def _forward(self, index: int, module: nn.Module, *_: Any) -> None:
        # Of a forward without gradient that trains, a checkpoint may make a backward all the same.
        evaluates = not module.training and not torch.is_grad_enabled()
        if not evaluates and not self._running:  # else recomputed activations
            self._due[index] += 1

    def _reduced(self, index: int, reduced: torch.Tensor) -> None:
        memory = self._memories[index]
        if self._ranks > 1:
            memory.check(reduced)
        if reduced.is_cuda and reduced is not memory.offered:
            # FSDP2 adds it to the gradient on this stream after the hook, and lets go of it, but
            # its memory was taken on another one.
            reduced.record_stream(torch.cuda.current_stream())
        self._advance(index)

    def _advance(self, index: int) -> None:
        self._memories[index].offer(None)
        if not self._running:  # a gradient that the loss itself asks for: the backward comes
            return
        before = self._finished
        while self._finished < len(self._done) and self._done[self._finished]:
            self._finished += 1
        if self._finish is not None and self._finished > before:
            self._finish(self._finished)
        self._due[index] -= 1
        self._done[index] = self._due[index] == 0
