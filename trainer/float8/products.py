"""The three matrix products of a linear layer in 8-bit floating point, with their gradients.

    output          y_MN = x_MK @ w_NK.T
    input gradient  dx_MK = dy_MN @ w_NK
    weight gradient dw_NK = dy_MN.T @ x_MK

Each is `torch._scaled_mm`, which wants both factors contiguous along what is summed. Accumulated in
float32; for the output alone with Hopper's fast accumulation, as torchao and Transformer Engine do.
On a CPU it is a product in float32: there oneDNN's reference takes 70 to 500 times as long.

Recipes:

    tensorwise   one scale for each tensor; x and w in e4m3, gradients in e5m2. What is kept for
                 backward of x is its 8 bits.
    rowwise      one scale for each row of each factor, along what is summed; all in e4m3. x and w
                 are rounded a second time for backward, along their other dimension.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433); the recipes are
those of torchao's `Float8LinearConfig`, but for tensorwise scales, which are powers of two here.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.nn.functional import pad

from trainer.float8.scales import Scaled, to_float8
from trainer.float8.weight import Float8Weight

Recipe = Literal["tensorwise", "rowwise"]
"""See `Float8.recipe`."""

ALIGNED = 16
"""What `_scaled_mm` wants sides of its matrices to be multiples of."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def linear(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """`x @ weight.T`, in the dtype of `x`.

    Args:
        x: (..., in).
        weight: (out, in), or a `Float8Weight` of that shape.
        recipe: how it is scaled.
    """
    function = _Tensorwise if recipe == "tensorwise" else _Rowwise
    y: torch.Tensor = function.apply(x.flatten(0, -2), weight)
    return y.unflatten(0, x.shape[:-1])


@torch._dynamo.allow_in_graph
class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        x = to_float8(x_MK, E4M3, by_row=False)
        ctx.save_for_backward(*x, w_NK)
        return _product(x, _scaled_weight(w_NK), x_MK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_data, x_inverse, w_NK = ctx.saved_tensors
        dx_MK = dw_NK = None
        dy = to_float8(dy_MN, E5M2, by_row=False)
        if ctx.needs_input_grad[0]:
            dx_MK = _product(dy, _turned(_scaled_weight(w_NK)), dy_MN.dtype)
        if ctx.needs_input_grad[1]:
            x = Scaled(x_data, x_inverse)
            dw_NK = _product(_turned(dy), _turned(x), dy_MN.dtype)
        return dx_MK, dw_NK


@torch._dynamo.allow_in_graph
class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        return _by_rows(x_MK, w_NK, fast=True)

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_MK, w_NK = ctx.saved_tensors
        dx_MK = _by_rows(dy_MN, w_NK.t()) if ctx.needs_input_grad[0] else None
        dw_NK = None
        if ctx.needs_input_grad[1]:
            rows = (0, -x_MK.shape[0] % ALIGNED)
            dw_NK = _by_rows(pad(dy_MN.t(), rows), pad(x_MK.t(), rows))
        return dx_MK, dw_NK


def _by_rows(a_MK: torch.Tensor, b_NK: torch.Tensor, *, fast: bool = False) -> torch.Tensor:
    """`a @ b.T`, both rounded with a scale for each row."""
    a, b = to_float8(a_MK, E4M3, by_row=True), to_float8(b_NK, E4M3, by_row=True)
    return _product(a, Scaled(b.data, b.inverse.t()), a_MK.dtype, fast=fast)


def _product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """`a @ b.T`."""
    if a.data.is_cpu and not is_fake(a.data):  # what is traced or counted runs on GPUs
        return _product_on_cpu(a, b, dtype)
    return torch._scaled_mm(
        a.data,
        b.data.t(),
        scale_a=a.inverse,
        scale_b=b.inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _product_on_cpu(a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """The same: each product of two numbers of 8 bits is exact in float32, and so is a scale."""
    with torch.autocast("cpu", enabled=False):
        product = a.data.float() @ b.data.float().t()
    # Not in place: `product` may be kept for backward.
    return (product * a.inverse * b.inverse).to(dtype)


def _scaled_weight(w_NK: torch.Tensor) -> Scaled:
    """The weight in 8 bits: as it was gathered, or rounded here."""
    if isinstance(w_NK, Float8Weight):
        return Scaled(w_NK.data8, w_NK.scale_inverse)
    return to_float8(w_NK, E4M3, by_row=False)


def _turned(x: Scaled) -> Scaled:
    """Transposed, so that its rows are summed over; of a weight 16 divides them already."""
    return Scaled(padded(x.data).t().contiguous(), x.inverse)


def padded(x_MK: torch.Tensor) -> torch.Tensor:
    """With rows of zeros, up to a multiple of 16. They change no amax. Transformer Engine's layers
    take their rows so, too."""
    rows = -x_MK.shape[0] % ALIGNED
    return torch.cat([x_MK, x_MK.new_zeros((rows, x_MK.shape[1]))]) if rows else x_MK
