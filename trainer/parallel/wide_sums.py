"""Gradients that come in bfloat16, to where they are kept in float32.

torch's own kernel for such a sum casts each number by itself, and moves 2.8 TB/s on an H200, where
one that is compiled moves 4.3 (beside backward 1.65 and 2.9). The bits are the same: a cast to
float32 is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from trainer.parallel.compiled import ROW, Compile, as_rows, compile_function

_LEAST = 1 << 16
"""Numbers in a sum that is compiled. A call takes 0.07 ms of the host, which is ahead of the device
in backward; torch's own takes all that are smaller in one call."""

_ALIGNED = 16
"""Bytes: of what does not begin at a multiple of them, what is compiled takes a copy."""

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]

AddTo = Callable[[Tensors, Tensors], None]
"""Adds to each tensor the one at its place in the other list, in place."""


def add_wide(sums: Tensors, given: Tensors) -> None:
    """As torch does."""
    torch._foreach_add_(sums, given)


def make_add(compiled: Compile, device: torch.device) -> AddTo:
    """How the gradients of later micro-batches are added. What is compiled is tried here: a step
    has no time for that.

    Args:
        compiled: see `TrainConfig.compile`.
        device: of the gradients.

    Raises:
        CompileError: it cannot be compiled, and has to be.
        CompilerFailed: torch's compiler failed.
    """
    if compiled == "off":
        return add_wide
    add = _Compiled(required=compiled == "require")
    sums = torch.zeros(2 * _LEAST, device=device)
    add([sums], [torch.zeros_like(sums, dtype=torch.bfloat16)])
    return add


class _Compiled:
    """Adds large ones by a kernel that is compiled, once in a process and for all sizes."""

    def __init__(self, *, required: bool) -> None:
        self._add = _compiled_add(required)

    def __call__(self, sums: Tensors, given: Tensors) -> None:
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for pair in zip(sums, given, strict=True):
                if _is_worth_it(*pair):
                    self._add(*(as_rows(tensor.view(-1)) for tensor in pair))
                else:
                    small.append(pair)
        if small:
            add_wide(*zip(*small, strict=True))


def _is_worth_it(sums: torch.Tensor, given: torch.Tensor) -> bool:
    return (
        sums.dtype != given.dtype
        and sums.numel() >= _LEAST
        and sums.numel() % ROW == 0
        and all(map(_is_in_place, (sums, given)))
    )


def _is_in_place(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED == 0


@cache
def _compiled_add(required: bool) -> Callable[[torch.Tensor, torch.Tensor], None]:
    return compile_function(
        "the sum of gradients", _add, required=required, wanted=lambda: True, dynamic=True
    )


def _add(sums: torch.Tensor, given: torch.Tensor) -> None:
    sums.add_(given)
