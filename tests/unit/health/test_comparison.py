from __future__ import annotations

import pytest

from health.corruption import Comparison, compare_checksums


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
