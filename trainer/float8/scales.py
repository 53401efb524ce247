"""From numbers to 8-bit floats and a scale that is a power of two.

The scale follows from the largest magnitude alone, by integer arithmetic on its bits: no division
or logarithm, whose last bit differs between kernels. Multiplying by a power of two is exact, so
eager and compiled code agree, and a value is rounded once, when it becomes 8 bits. Nothing of an
earlier step enters: the same tensor has the same scale on whichever replica it is computed.

Shapes: x_MK is a matrix whose second dimension a product sums over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The largest number of either format is 1.75 times two to this: 448 and 57344."""

_MANTISSA = 0x7FFFFF
_ABOVE_1_75 = 0x600000
"""The mantissa of 1.75 in float32: beyond it the scale is half as large."""
_LAST_EXPONENT = 253
"""Of a scale, biased, so that the inverse is a normal number, too."""


class Scaled(NamedTuple):
    """Numbers in 8 bits, and what to multiply them by."""

    data: torch.Tensor
    """float8, contiguous."""
    inverse: torch.Tensor
    """float32: one number, or one for each row, (M, 1)."""


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest power of two that keeps `amax` within `dtype`, and its inverse, in float32. Of an
    amax that is infinite or no number the scale is no number, so that a product shows it: a cast to
    8 bits may make a finite number of an infinity.

    Args:
        amax: magnitudes, 0 or more; any shape.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    bits = amax.float().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    biased = 254 + LARGEST_EXPONENT[dtype] - exponent - (mantissa > _ABOVE_1_75).int()
    biased = biased.clamp(1, _LAST_EXPONENT)
    scale = torch.where(exponent == 255, torch.nan, (biased << 23).view(torch.float32))
    return scale, ((254 - biased) << 23).view(torch.float32)


def largest(x_MK: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """The largest magnitude of all, or of each row, (M, 1)."""
    low, high = torch.aminmax(x_MK, dim=1, keepdim=True) if by_row else torch.aminmax(x_MK)
    return torch.maximum(high, -low)


def to_float8(x_MK: torch.Tensor, dtype: torch.dtype, *, by_row: bool) -> Scaled:
    """Rounds a matrix to 8 bits with current scaling: one scale, or one for each row."""
    scale, inverse = scale_of(largest(x_MK, by_row=by_row), dtype)
    return Scaled(cast(x_MK, scale, dtype), inverse)


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` times a power of two, rounded to 8 bits, contiguous."""
    return (x * scale.to(x.dtype)).to(dtype).contiguous()
