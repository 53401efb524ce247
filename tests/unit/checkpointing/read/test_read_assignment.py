"""Shares cover every element exactly once, are about equal, and are cut where it costs little."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format.layout import PIECE_BYTES, SEGMENT_BYTES, table_bytes
from checkpointing.read.assignment import LEAST_BYTES, Rows, plan_shares

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)
boxes = st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=8)


def bytes_of(part: Rows, sizes: list[tuple[int, ...]], items: list[int]) -> int:
    return part.rows * math.prod(sizes[part.box][1:]) * items[part.box]


@given(boxes, st.integers(1, 6), st.integers(0, 200), st.integers(1, 300))
def test_every_row_is_in_one_share_and_each_share_is_a_run(
    drawn: list[tuple[tuple[int, ...], int]], parts: int, whole: int, least: int
) -> None:
    sizes, items = [s for s, _ in drawn], [i for _, i in drawn]
    shares = plan_shares(sizes, items, parts, whole_bytes=whole, least_bytes=least)
    assert len(shares) == parts
    dealt = [(p.box, row) for s in shares for p in s for row in range(p.first, p.first + p.rows)]
    # In order, too: then the bytes of each share lie together where the boxes do.
    assert dealt == [
        (box, row) for box, size in enumerate(sizes) for row in range(size[0] if size else 1)
    ]


@given(boxes, st.integers(1, 6), st.integers(0, 200))
def test_shares_are_equal_but_for_a_box_that_is_not_cut_or_a_row(
    drawn: list[tuple[tuple[int, ...], int]], parts: int, whole: int
) -> None:
    sizes, items = [s for s, _ in drawn], [i for _, i in drawn]
    totals = [math.prod(s) * i for s, i in drawn]
    units = [
        t if t <= whole else t // (s[0] if s else 1) for t, s in zip(totals, sizes, strict=True)
    ]
    shares = plan_shares(sizes, items, parts, whole_bytes=whole, least_bytes=1)
    readers = max(1, min(parts, sum(totals)))
    for share in shares[:readers]:
        size = sum(bytes_of(part, sizes, items) for part in share)
        assert abs(size - sum(totals) / readers) <= max(units) + 1  # half a unit at either end
    assert not any(shares[readers:])


@given(boxes, st.integers(2, 6), st.integers(0, 200))
def test_what_is_small_is_not_cut(
    drawn: list[tuple[tuple[int, ...], int]], parts: int, whole: int
) -> None:
    sizes, items = [s for s, _ in drawn], [i for _, i in drawn]
    for part in itertools.chain(
        *plan_shares(sizes, items, parts, whole_bytes=whole, least_bytes=1)
    ):
        total = math.prod(sizes[part.box]) * items[part.box]
        assert total > whole or bytes_of(part, sizes, items) == total


def test_a_gigabyte_is_cut_and_little_is_left_to_one() -> None:
    sizes, items = [(2**14, 2**14), (2**14,)], [4, 4]
    shares = plan_shares(sizes, items, 3)
    assert [sum(bytes_of(p, sizes, items) for p in share) // 2**20 for share in shares] == [341] * 3
    # One of three reads a piece and a table too much at each end, and that is to be little.
    read_twice = PIECE_BYTES + table_bytes(SEGMENT_BYTES, PIECE_BYTES)
    assert 2 * read_twice / LEAST_BYTES <= 1 / 50
    assert plan_shares([(1000, 1000)], [4], 3) == [[Rows(box=0, first=0, rows=1000)], [], []]
