from __future__ import annotations

import pytest

from health.digits import three_digits


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.0, "0"),
        (64 / 2**20, "0.000061"),
        (0.0625, "0.0625"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.6, "1000"),
        (1234.0, "1230"),
        (3_350_000.0, "3350000"),
        (-1234.0, "-1230"),
    ],
)
def test_three_digits_and_no_exponent(number: float, shown: str) -> None:
    assert three_digits(number) == shown
