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
from functools import cache
from typing import Any

import torch
from torch import nn

from trainer.parallel.compiled import ROW, as_rows, compile_function

MOMENTS = ("exp_avg", "exp_avg_sq")

_AT_ONCE = 1 << 24
"""Numbers that are updated at once, with up to twenty bytes of memory for each meanwhile. Vector
instructions divide it: the tail of a kernel may round otherwise."""

_COMPILED_AT_ONCE = 1 << 26
"""And where the update is compiled, which needs none of that (but 2 GB where it cannot be). A call
takes the host some 0.1 ms, as long as the device needs for 16 million numbers: with `_AT_ONCE` of
them it would wait for the host."""

_TOGETHER = 1 << 16
"""Parameters with fewer numbers are updated together, for the same reason, in a copy."""

_LEAST = 2 * ROW
"""Numbers that a compiled update has at least: torch.compile makes another graph for one row. So it
has one graph for all sizes, which a trial on small tensors has seen, and no tail that may round
otherwise."""

_LOW_BITS = 0xFFFF
"""Of a float32: what a bfloat16 has not."""

Piece = tuple[torch.Tensor, ...]
"""Of one parameter: its numbers, their gradients, both moments, and, but where the update is
compiled, the step counter."""


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
        self._compiled: Callable[..., Any] | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "scale": 1.0}
        super().__init__(params, defaults)

    def compile(self, *, required: bool) -> None:
        """Has torch.compile make one kernel of an update. As it is, it is some fifty, which read
        and write 420 bytes a number where 16 would do.

        Args:
            required: see `compile_function`.
        """
        self._compiled = _compiled_update(required)

    @property
    def takes_scale(self) -> bool:
        """Whether an update is by the gradients times the group's `scale`, which spares a pass over
        them."""
        return self._compiled is not None

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
            if self._compiled is None:
                for pieces in _batches(self._pieces(params, _AT_ONCE)):
                    _update(pieces, group)
            elif params:
                self._step_compiled(self._compiled, group)

    def _step_compiled(self, update: Callable[..., Any], group: dict[str, Any]) -> None:
        settings = self._settings(group)
        small: list[Piece] = []
        for *numbers, _ in self._pieces(group["params"], _COMPILED_AT_ONCE):
            size = numbers[0].numel()
            end = size // ROW * ROW if size >= _TOGETHER else 0
            if end:
                update(*(as_rows(tensor[:end]) for tensor in numbers), *settings)
            if end < size:
                small.append(tuple(tensor[end:] for tensor in numbers))
        for together in _batches(small):
            self._update_together(update, together, settings)
        # autograd is to notice a backward over weights that were updated after their forward
        torch.autograd.graph.increment_version(group["params"])

    @staticmethod
    def _update_together(
        update: Callable[..., Any],
        pieces: list[Piece],
        settings: Sequence[torch.Tensor],
    ) -> None:
        """Those of one batch, in a copy."""
        columns = [list(column) for column in zip(*pieces, strict=True)]
        padded = [_padded(column) for column in columns]
        update(*map(as_rows, padded), *settings)
        sizes = [tensor.numel() for tensor in columns[0]]
        for number in (0, 2, 3):  # the gradients are what they were
            whole = padded[number][: sum(sizes)]
            torch._foreach_copy_(columns[number], list(whole.split(sizes)))

    def _settings(self, group: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """What an update of any number of a group needs, on the device: a number in the code would
        be compiled into it. The parameters of a group have done equally many steps."""
        step = self.state[group["params"][0]]["step"]
        lr, (beta1, beta2), counted = group["lr"], group["betas"], step.double()
        rate = lr / (1 - beta1**counted)
        root = (1 - beta2**counted).sqrt()
        kept = 1 - lr * group["weight_decay"]
        numbers = group["scale"], kept, 1 - beta1, beta2, 1 - beta2, group["eps"]
        given = (torch.full((), number, device=step.device) for number in numbers)
        return step, rate.float(), root.float(), *given

    def _begin(self, param: nn.Parameter) -> None:
        state = self.state[param]
        state["step"] = torch.zeros((), device=param.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(param, dtype=self._moment_dtype)

    def _pieces(self, params: list[nn.Parameter], most: int) -> Iterator[Piece]:
        """All numbers, each piece of one parameter, with `most` of them at most. A kernel that is
        compiled takes a copy of a gradient that does not begin at a multiple of 16 bytes."""
        for param in params:
            assert param.grad is not None
            state = self.state[param]
            whole = (param, param.grad, *(state[moment] for moment in MOMENTS))
            for piece in zip(*(t.view(-1).split(most) for t in whole), strict=True):
                if piece[0].numel():
                    yield (*piece, state["step"])


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """All of them, `_AT_ONCE` numbers at most in each batch."""
    batch: list[Piece] = []
    room = _AT_ONCE
    for piece in pieces:
        if piece[0].numel() > room:
            yield batch
            batch, room = [], _AT_ONCE
        batch.append(piece)
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


def update(
    param: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    root: torch.Tensor,
    scale: torch.Tensor,
    kept: torch.Tensor,
    new1: torch.Tensor,
    old2: torch.Tensor,
    new2: torch.Tensor,
    eps: torch.Tensor,
) -> None:
    """What `_update` does with one parameter, for torch.compile. What is the same for all numbers
    comes in: in the kernel it would be computed for each."""
    grad = grad * scale
    mean = first.float() + new1 * (grad - first.float())
    square = old2 * second.float() + new2 * grad * grad
    weights = param.float() * kept - rate * mean / (square.sqrt() / root + eps)
    bits = grad.view(torch.int32).clone()
    if first.dtype != torch.float32:
        bits = hash_bits(bits, square.view(torch.int32), step)
        mean, square = _rounded(mean, bits), _rounded(square, bits >> 16)
    if param.dtype != torch.float32:
        weights = _rounded(weights, hash_bits(bits, weights.view(torch.int32), step))
    param.copy_(weights)
    first.copy_(mean)
    second.copy_(square)


def _padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A copy of them, one after the other, with zeros behind that fill its rows."""
    size = sum(tensor.numel() for tensor in tensors)
    filled = max(_LEAST, -(-size // ROW) * ROW)
    return torch.cat([*tensors, tensors[0].new_zeros(filled - size)])


@cache
def _compiled_update(required: bool) -> Callable[..., Any]:
    """One in a process: an optimizer that is made anew finds its kernel."""
    return compile_function(
        "the update of bfloat16 state",
        update,
        required=required,
        wanted=lambda: True,
        dynamic=True,
    )


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


def _rounded(numbers: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """As `round_by`, in new memory."""
    word = numbers.view(torch.int32) + (bits & _LOW_BITS)
    return (word & ~_LOW_BITS).view(torch.float32)


def round_by(numbers: torch.Tensor, bits: torch.Tensor) -> None:
    """Rounds float32 `numbers` to bfloat16, in place, up or down by the low 16 of their `bits`."""
    word = numbers.view(torch.int32)
    word.add_(bits & _LOW_BITS).bitwise_and_(~_LOW_BITS)
