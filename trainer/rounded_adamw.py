"""AdamW whose parameters or moments are kept in bfloat16, at two bytes a number instead of four.

An update is far smaller than what a bfloat16 can tell apart (one part in 256), so the nearest one
would often be the old one: the second moment would stand still, and weights would not learn. Here
it is rounded up or down, with the chance that makes it right on average. What decides is a hash of
the numbers themselves and of the step, not a generator: so replicas round alike, a copy of the
state goes on alike, and a part of a parameter comes out as in the whole, whichever worker has it.

Source: Gupta et al., Deep Learning with Limited Numerical Precision, 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")

_AT_ONCE = 1 << 24
"""Numbers that are updated at once, with up to twenty bytes of memory for each meanwhile. Vector
instructions divide it: the tail of a kernel may round otherwise."""

_LOW_BITS = 0xFFFF
"""Of a float32: what a bfloat16 has not."""

Piece = tuple[torch.Tensor, ...]
"""Of one parameter: its numbers, their gradients, both moments, and the step counter."""


class RoundedAdamW(torch.optim.Optimizer):
    """See above.

    Args:
        params: float32 or bfloat16 parameters with float32 gradients, or groups of them.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: of the denominator.
        moment_dtype: float32 or bfloat16.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moment_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._moment_dtype = moment_dtype
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """An update by the gradients. On CUDA nobody waits for it."""
        for group in self.param_groups:
            params = group["params"]
            for param in params:
                if not self.state[param]:
                    self._begin(param)
            steps = [self.state[param]["step"] for param in params]
            if steps:
                torch._foreach_add_(steps, 1)
            for pieces in self._batches(params):
                _update(pieces, group)

    def _begin(self, param: nn.Parameter) -> None:
        state = self.state[param]
        state["step"] = torch.zeros((), device=param.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(param, dtype=self._moment_dtype)

    def _batches(self, params: list[nn.Parameter]) -> Iterator[list[Piece]]:
        """All numbers, `_AT_ONCE` of them at most in each."""
        batch: list[Piece] = []
        room = _AT_ONCE
        for param in params:
            assert param.grad is not None
            state = self.state[param]
            whole = (param, param.grad, *(state[moment] for moment in MOMENTS))
            for piece in zip(*(t.view(-1).split(_AT_ONCE) for t in whole), strict=True):
                if piece[0].numel() > room:
                    yield batch
                    batch, room = [], _AT_ONCE
                batch.append((*piece, state["step"]))
                room -= piece[0].numel()
        if batch:
            yield batch


class _Wide:
    """Numbers in float32, beside where they are kept if they are kept in bfloat16."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        self._kept, self.parts = kept, kept
        self.narrow = kept[0].dtype != torch.float32
        if self.narrow:
            self._flat = _flat_copy(kept)
            self.parts = list(self._flat.split([tensor.numel() for tensor in kept]))

    @property
    def bits(self) -> torch.Tensor:
        """Those of all the numbers, one after another."""
        return self._flat.view(torch.int32)

    def keep(self, bits: torch.Tensor) -> None:
        """Rounds the numbers by the low 16 of their `bits`, and puts them where they are kept."""
        round_by(self._flat, bits)
        torch._foreach_copy_(self._kept, self.parts)


def _update(pieces: list[Piece], group: dict[str, Any]) -> None:
    """AdamW in float32, then what is kept in bfloat16 is rounded."""
    params, grads, firsts, seconds, steps = (list(column) for column in zip(*pieces, strict=True))
    weights, first, second = _Wide(params), _Wide(firsts), _Wide(seconds)
    torch._fused_adamw_(
        weights.parts,
        grads,
        first.parts,
        second.parts,
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    bits = _flat_copy(grads).view(torch.int32)
    if first.narrow:
        hash_bits(bits, second.bits, steps[0])
        first.keep(bits)
        second.keep(bits >> 16)
    if weights.narrow:
        weights.keep(hash_bits(bits, weights.bits, steps[0]))


def _flat_copy(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their numbers in float32, one after another."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    torch._foreach_copy_(list(flat.split(sizes)), list(tensors))
    return flat


def hash_bits(one: torch.Tensor, other: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """32 bits of each number that look random. `one` is overwritten, and holds them.

    Source: Wellons, Prospecting for Hash Functions, 2018 (lowbias32).
    """
    one.bitwise_xor_(other * 0x2C1B3C6D).add_(step.to(torch.int32) * 0x297A2D39)
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):
        one.bitwise_xor_((one >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    return one.bitwise_xor_((one >> 16).bitwise_and_(_LOW_BITS))


def round_by(numbers: torch.Tensor, bits: torch.Tensor) -> None:
    """Rounds float32 `numbers` to bfloat16, in place, up or down by the low 16 of their `bits`."""
    word = numbers.view(torch.int32)
    word.add_(bits & _LOW_BITS).bitwise_and_(~_LOW_BITS)
