"""A whole weight in 8 bits, as FSDP2's all-gather leaves it.

To autograd it is a parameter in the dtype of the computation, whose gradient has that dtype; what
lies in memory is a byte for each number, and one scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_aten = torch.ops.aten
_KEEP = frozenset({_aten.as_strided.default, _aten.detach.default, _aten.view.default})
"""What FSDP2, DTensor and autograd do to a whole parameter, whose shape stays."""


class Float8Weight(torch.Tensor):
    """A matrix in float8_e4m3fn with one scale.

    Args:
        data8: the numbers.
        scale_inverse: what to multiply them by, one float32.
        dtype: that it has to others.
    """

    data8: torch.Tensor
    scale_inverse: torch.Tensor

    @staticmethod
    def __new__(
        cls, data8: torch.Tensor, scale_inverse: torch.Tensor, dtype: torch.dtype
    ) -> Float8Weight:
        weight: Float8Weight = torch.Tensor._make_wrapper_subclass(
            cls,
            data8.size(),
            strides=data8.stride(),
            storage_offset=data8.storage_offset(),
            dtype=dtype,
            device=data8.device,
        )
        weight.data8, weight.scale_inverse = data8, scale_inverse
        return weight

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["data8", "scale_inverse"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], dtype: torch.dtype, *_: Any
    ) -> Float8Weight:
        return Float8Weight(inner["data8"], inner["scale_inverse"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        weight = args[0]
        if func not in _KEEP or not isinstance(weight, Float8Weight):
            raise TypeError(
                f"{func} of a weight that was gathered in 8 bits: it is for Float8Linear alone. "
                "Use Float8(gather=False)"
            )
        data8 = func(weight.data8, *args[1:], **(kwargs or {}))
        return Float8Weight(data8, weight.scale_inverse, weight.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Float8Weight({self.data8!r}, scale_inverse={self.scale_inverse!r})"
