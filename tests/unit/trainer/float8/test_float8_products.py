"""Scales and products in 8 bits, against float64 and the definition of the formats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.float8 import products
from trainer.float8.products import Recipe, linear
from trainer.float8.scales import LARGEST_EXPONENT, Scaled, scale_of, to_float8

FORMATS = sorted(LARGEST_EXPONENT, key=str)


def scale_by_definition(amax: float, dtype: torch.dtype) -> float:
    """The largest power of two whose product with amax the format holds, in exact arithmetic."""
    power = math.floor(math.log2(torch.finfo(dtype).max)) - math.frexp(amax)[1] + 2
    while amax * 2.0**power > torch.finfo(dtype).max:
        power -= 1
    return float(2.0**power)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(mantissa=st.integers(0, 2**23 - 1), exponent=st.integers(-80, 80))
def test_a_scale_is_the_largest_power_of_two_that_fits(
    dtype: torch.dtype, mantissa: int, exponent: int
) -> None:
    amax = (1 + mantissa / 2**23) * 2.0**exponent
    scale, inverse = scale_of(torch.tensor(amax), dtype)
    assert scale.item() == scale_by_definition(amax, dtype)
    assert inverse.item() == 1 / scale.item()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_one_and_three_quarters_is_where_the_scale_halves(dtype: torch.dtype) -> None:
    just_above = float(np.nextafter(np.float32(1.75), np.float32(2)))
    below, above = (scale_of(torch.tensor(amax), dtype)[0].item() for amax in (1.75, just_above))
    assert (below, above) == (2.0 ** LARGEST_EXPONENT[dtype], 2.0 ** (LARGEST_EXPONENT[dtype] - 1))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_is_not_finite_shows_in_the_product(value: float, recipe: Recipe) -> None:
    x, weight = torch.ones(2, 16), torch.ones(16, 16)
    x[1, 3] = value
    assert not linear(x, weight, recipe)[1].isfinite().any()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_its_scale_is_no_number_whatever_a_cast_makes_of_it(
    amax: float, dtype: torch.dtype
) -> None:
    assert scale_of(torch.tensor(amax), dtype)[0].isnan()


def test_zeros_stay_zeros() -> None:
    made = to_float8(torch.zeros(4, 16), torch.float8_e4m3fn, by_row=True)
    assert made.data.float().eq(0).all() and made.inverse.isfinite().all()


def rounded(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """To 8 bits and back, in float64; the scale by definition."""
    amaxes = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.tensor(
        [scale_by_definition(a, dtype) for a in amaxes.flatten().tolist()], dtype=torch.float64
    ).view(amaxes.shape)
    return (x.double() * scale).to(dtype).double() / scale


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("tokens", [32, 21])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_three_products_are_those_of_the_rounded_factors(recipe: Recipe, tokens: int) -> None:
    """Against float64 products of factors that are rounded by the definition; with a number of
    tokens that 16 does not divide, too. What is left is float32's sum and the rounding of the
    result to bfloat16."""
    torch.manual_seed(3)
    x = (torch.randn(tokens, 48) * 3).bfloat16().requires_grad_()
    weight = (torch.randn(32, 48) / 7).bfloat16().requires_grad_()
    dy = (torch.randn(tokens, 32) * 1e-3).bfloat16()
    y = linear(x, weight, recipe)
    y.backward(dy)
    by, grads = (None, E5M2) if recipe == "tensorwise" else (1, E4M3)
    across = None if by is None else 0
    xs, ws, dys = x.detach(), weight.detach(), dy
    expected = {
        "y": rounded(xs, E4M3, by) @ rounded(ws, E4M3, by).t(),
        "dx": rounded(dys, grads, by) @ rounded(ws, E4M3, across),
        "dw": rounded(dys, grads, across).t() @ rounded(xs, E4M3, across),
    }
    assert x.grad is not None and weight.grad is not None
    for name, got in {"y": y.detach(), "dx": x.grad, "dw": weight.grad}.items():
        wanted = expected[name]
        assert got.dtype == torch.bfloat16
        error = (got.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2**-8, (name, error)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_cpu_a_product_is_torch_s_own(dtype: torch.dtype, by_row: bool) -> None:
    torch.manual_seed(7)
    a = to_float8(torch.randn(32, 64) * 5, E4M3, by_row=by_row)
    b = to_float8(torch.randn(48, 64) / 9, E4M3, by_row=by_row)
    if by_row:
        b = Scaled(b.data, b.inverse.t())
    torch_s = torch._scaled_mm(a.data, b.data.t(), a.inverse, b.inverse, out_dtype=dtype)
    torch.testing.assert_close(products._product(a, b, dtype), torch_s, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [32, 21])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_gpu_takes_the_factors_as_they_lie(
    recipe: Recipe, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch wants of them on GPUs: sides that 16 divides, contiguous along what is summed."""
    taken: list[tuple[Scaled, Scaled]] = []

    def noting(a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        taken.append((a, b))
        return on_cpu(a, b, dtype)

    on_cpu = products._product_on_cpu
    monkeypatch.setattr(products, "_product_on_cpu", noting)
    x = torch.randn(tokens, 48, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True)
    linear(x, weight, recipe).sum().backward()
    assert len(taken) == 3
    with FakeTensorMode():
        for a, b in taken:
            on_gpus = [Scaled(*map(on_gpu, factor)) for factor in (a, b)]
            products._product(on_gpus[0], on_gpus[1], torch.bfloat16)


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """Of the same shape and strides, without numbers."""
    return torch.empty_strided(x.shape, x.stride(), device="cuda", dtype=x.dtype)


@pytest.mark.parametrize(("recipe", "most"), [("tensorwise", 0.07), ("rowwise", 0.06)])
def test_gradients_are_within_the_stated_share_of_float32(recipe: Recipe, most: float) -> None:
    """The norm of the difference over the norm, of one layer; decision 058 has what they were."""
    torch.manual_seed(5)
    values = torch.randn(256, 128), torch.randn(64, 128) / 11, torch.randn(256, 64)
    x, weight, dy = (value.bfloat16() for value in values)
    x.requires_grad_(), weight.requires_grad_()
    linear(x, weight, recipe).backward(dy)
    exact = {"x": dy.float() @ weight.float(), "weight": dy.float().t() @ x.float()}
    for name, got in {"x": x.grad, "weight": weight.grad}.items():
        assert got is not None
        share = (got.float() - exact[name]).norm() / exact[name].norm()
        assert 0.001 < share < most, (name, share)


def test_of_a_frozen_weight_no_gradient_is_computed() -> None:
    x = torch.randn(16, 16).requires_grad_()
    weight = torch.randn(16, 16)
    linear(x, weight, "tensorwise").sum().backward()
    assert x.grad is not None and weight.grad is None
