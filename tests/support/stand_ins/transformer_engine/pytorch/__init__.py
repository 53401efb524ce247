"""The classes that we call. Each call must fit the recorded signatures of all versions."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainer.float8.products import linear

_TESTS = next(path for path in Path(__file__).resolve().parents if path.name == "tests")
_RECORDED = json.loads((_TESTS / "unit/trainer/te/signatures.json").read_text())["versions"]


def _bind(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by name.

    Raises:
        TypeError: a version takes no such call.
    """
    for version in _RECORDED.values():
        parameters = [
            inspect.Parameter(
                parameter,
                inspect._ParameterKind[kind],
                default=None if optional and kind != "VAR_KEYWORD" else inspect.Parameter.empty,
            )
            for parameter, kind, optional in version["signatures"][name]
        ]
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    return dict(bound.arguments)


class Linear(nn.Module):
    """Like theirs, it counts on CUDA's stream order for nothing: the weight is saved for
    backward."""

    weight: nn.Parameter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = _bind("Linear", *args, **kwargs)
        assert given["bias"] is False and given["device"] == "meta"
        shape = given["out_features"], given["in_features"]
        self.weight = nn.Parameter(torch.empty(shape, dtype=given["params_dtype"], device="meta"))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = _bind("Linear.forward", *args, **kwargs)["inp"]
        assert x.dtype == self.weight.dtype
        if _recipes:
            # Theirs wants 8 in forward, and 16 for the weight's gradient.
            assert math.prod(x.shape[:-1]) % 16 == 0, f"{tuple(x.shape)}: rows in 8 bits"
            return linear(x, self.weight, "tensorwise")
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Like theirs, it reads its weight in backward once more."""

    weight: nn.Parameter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = _bind("RMSNorm", *args, **kwargs)
        more = _bind("RMSNorm, its base", given["normalized_shape"], **given["kwargs"])
        assert more["device"] == "meta"
        self.eps = given["eps"]
        size, dtype = given["normalized_shape"], more["dtype"]
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Norm.apply(x, self.weight, self)
        return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x)
        return F.rms_norm(x, weight.shape, weight, norm.eps)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.norm.weight
        assert not weight.is_meta and weight.untyped_storage().nbytes(), "gone before backward"
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = F.rms_norm(inputs[0], weight.shape, inputs[1], ctx.norm.eps)
        dx, dweight = torch.autograd.grad(y, inputs, dy)
        return dx, dweight, None


_recipes: list[Any] = []


@contextmanager
def autocast(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Layers in the block compute in 8 bits."""
    given = _bind("autocast", *args, **kwargs)
    assert given["enabled"] and type(given["recipe"]).__name__ in _RECORDED["2.18.0"]["recipes"]
    _recipes.append(given["recipe"])
    try:
        yield
    finally:
        _recipes.pop()


def is_bf16_available(*args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Yes."""
    _bind("is_bf16_available", *args, **kwargs)
    return True, ""


def is_fp8_available(*args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Yes."""
    _bind("is_fp8_available", *args, **kwargs)
    return True, ""


def is_fp8_block_scaling_available(*args: Any, **kwargs: Any) -> tuple[bool, str]:
    """No: a GPU that cannot."""
    _bind("is_fp8_block_scaling_available", *args, **kwargs)
    return False, "Device compute capability 9.0 or higher required"
