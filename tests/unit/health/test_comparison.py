from __future__ import annotations

import math
import struct

import pytest

from health.corruption import Comparison, compare_checksums, find_other_lanes, was_wrong


@pytest.mark.parametrize(
    ("checksums", "equal", "outliers"),
    [
        ([7], True, ()),
        ([7, 7, 7], True, ()),
        ([7, None, 7], True, ()),
        ([None, None], True, ()),
        ([7, 8, 7], False, (1,)),
        ([7, 8, None, 7, 9, 7], False, (1, 4)),
        ([7, 8], False, ()),
        ([7, 7, 8, 8], False, ()),
        ([7, 8, 9], False, ()),
    ],
)
def test_the_majority_is_right(
    checksums: list[int | None], equal: bool, outliers: tuple[int, ...]
) -> None:
    found = compare_checksums(checksums)
    assert found == Comparison(equal=equal, outliers=outliers)
    assert found.decided == (equal or bool(outliers))


@pytest.mark.parametrize(
    ("before", "position", "confirmed", "wrong"),
    [
        ((7, 8), 1, 7, True),
        ((7, 8), 0, 7, False),
        ((7, 8), 0, 9, False),  # it had spread: both were wrong
        ((7, 8), 1, 9, False),
        ((7, None, 8), 1, 7, False),  # it had no state yet
    ],
)
def test_who_was_wrong_shows_when_it_is_done_again(
    before: tuple[int | None, ...], position: int, confirmed: int, wrong: bool
) -> None:
    assert was_wrong(before, position, confirmed) == wrong


def test_lanes_differ_by_their_bits() -> None:
    first = struct.pack("<4d", 1.5, math.nan, 0.0, 2.0)
    again = struct.pack("<4d", 1.5, math.nan, -0.0, 2.0 + 2**-51)
    assert find_other_lanes(first, again) == (2, 3)
    assert find_other_lanes(first, first) == ()
