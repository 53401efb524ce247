"""Numbers as people read them. Pure."""

from __future__ import annotations

from decimal import Decimal


def three_digits(number: float) -> str:
    """A number rounded to three digits, and never with an exponent: 0.0625, 12.5, 1230."""
    return f"{Decimal(f'{number:.3g}'):f}"
