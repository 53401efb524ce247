from __future__ import annotations

import functools
import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import SliceError
from checkpointing.format.boxes import Box, TensorInfo, TensorSlice, intersect
from checkpointing.format.coverage import check_coverage
from checkpointing.format.cutting import pack, row_strides, split_box
from checkpointing.format.manifest import CrcTable, Segment
from checkpointing.read.fetches import plan_fetches, plan_reads
from tests.support.slice_tables import slice_table


def points(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> set[tuple[int, ...]]:
    ranges = (range(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    return set(itertools.product(*ranges))


boxes_2d = st.tuples(
    st.tuples(st.integers(0, 5), st.integers(0, 5)), st.tuples(st.integers(0, 4), st.integers(0, 4))
)


@given(boxes_2d, boxes_2d)
def test_intersect_is_set_intersection(
    a: tuple[tuple[int, int], tuple[int, int]], b: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    shared = intersect(*a, *b)
    assert (points(*shared) if shared else set()) == points(*a) & points(*b)


def test_intersect_of_scalars_is_the_scalar() -> None:
    assert intersect((), (), (), ()) == ((), ())


SHAPE = {"w": TensorInfo((4, 6), "float32")}
GRID = [Box("w", (r, c), (2, 3)) for r in (0, 2) for c in (0, 3)]


def test_coverage_accepts_tilings() -> None:
    check_coverage(slice_table(SHAPE, GRID))
    check_coverage(slice_table(SHAPE, [*GRID, Box("w", (4, 0), (0, 6))]))
    check_coverage(slice_table({"s": TensorInfo((), "int64")}, [Box("s", (), ())]))
    check_coverage(slice_table({"e": TensorInfo((0, 3), "int64")}, []))


@pytest.mark.parametrize(
    ("tensors", "slices", "message"),
    [
        (SHAPE, GRID[1:], "3 slices cover 18 of the 24"),
        (SHAPE, [*GRID, Box("w", (1, 2), (1, 1))], "overlap"),
        (SHAPE, [*GRID[:3], Box("w", (1, 3), (2, 3))], "overlap"),  # the volumes alone agree
        (SHAPE, [*GRID[:3], Box("w", (2, 4), (2, 3))], "not inside"),
        (SHAPE, [Box("w", (0,), (24,))], "not inside"),
        (SHAPE, [*GRID, Box("v", (0,), (1,))], "no rank declares"),
        ({"s": TensorInfo((), "int64")}, [Box("s", (), ())] * 2, "overlap"),
        ({"s": TensorInfo((), "int64")}, [], "0 slices cover 0 of the 1"),
    ],
)
def test_coverage_finds(tensors: dict[str, TensorInfo], slices: list[Box], message: str) -> None:
    with pytest.raises(SliceError, match=message):
        check_coverage(slice_table(tensors, slices))


def test_coverage_of_a_large_grid_is_fast() -> None:
    grid = [Box("w", (r * 3, c * 5), (3, 5)) for c in range(16) for r in range(1024)]
    # One cell is in two: then each part is looked at.
    halves = [Box("w", (0, 0), (3, 2)), Box("w", (0, 2), (3, 3)), *grid[1:]]
    began = time.process_time()
    for parts in (grid, halves):
        check_coverage(slice_table({"w": TensorInfo((3072, 80), "float32")}, parts))
    assert time.process_time() - began < 5  # all pairs would be 134 million


def test_slice_refuses_what_does_not_fit() -> None:
    with pytest.raises(SliceError, match="not inside"):
        TensorSlice("w", (4,), "float32", (3,), (2,))
    with pytest.raises(SliceError, match="float99"):
        TensorSlice("w", (4,), "float99", (0,), (4,))


@st.composite
def shapes_with_a_box(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, offsets, sizes


@given(shapes_with_a_box(), st.integers(1, 64), st.integers(1, 64))
def test_split_box_tiles_with_bounded_spans_and_gaps(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], max_bytes: int, max_stride: int
) -> None:
    shape, offsets, sizes = case
    flat = np.arange(math.prod(shape)).reshape(shape)
    seen: list[tuple[int, ...]] = []
    for part_offsets, part_sizes in split_box(
        offsets,
        sizes,
        row_strides(shape, 4),
        item_bytes=4,
        max_bytes=max_bytes,
        max_stride_bytes=max_stride,
    ):
        seen += points(part_offsets, part_sizes)
        where = tuple(slice(o, o + n) for o, n in zip(part_offsets, part_sizes, strict=True))
        at = np.sort(flat[where].ravel()) * 4
        assert at[-1] + 4 - at[0] <= max(max_bytes, 4)
        assert all(np.diff(at) <= max(max_stride, 4))
    assert len(seen) == len(set(seen))
    assert set(seen) == points(offsets, sizes)


@given(st.lists(st.integers(1, 50)), st.integers(1, 60))
def test_pack_keeps_order_and_bound(sizes: list[int], bound: int) -> None:
    bins = pack(sizes, bound)
    assert [item for members in bins for item in members] == list(range(len(sizes)))
    for members in bins:
        assert len(members) == 1 or sum(sizes[m] for m in members) <= bound
    for left, right in itertools.pairwise(bins):
        assert sum(sizes[m] for m in left) + sizes[right[0]] > bound


spans = st.lists(
    st.tuples(st.integers(0, 180), st.integers(1, 20)).map(lambda s: (s[0], sum(s))), max_size=12
)


@given(spans, st.integers(1, 16), st.integers(1, 80), st.integers(0, 20))
def test_fetches_hold_their_spans_and_few_needless_blocks(
    wanted: list[tuple[int, int]], block: int, bound: int, gap: int
) -> None:
    fetches = plan_fetches(
        wanted, block_bytes=block, size_bytes=200, max_bytes=bound, gap_bytes=gap
    )
    assert sorted(m for fetch in fetches for m in fetch.members) == list(range(len(wanted)))
    for fetch in fetches:
        assert fetch.start % block == 0
        assert fetch.stop % block == 0 or fetch.stop == 200
        assert fetch.stop - fetch.start <= bound or len(fetch.members) == 1
        held = [wanted[m] for m in fetch.members]
        assert all(fetch.start <= a and b <= fetch.stop for a, b in held)
        needed = [
            any(a < at + block and b > at for a, b in held)
            for at in range(fetch.start, fetch.stop, block)
        ]
        assert needed[0] and needed[-1]
        for is_needed, run in itertools.groupby(needed):
            assert is_needed or len(list(run)) * block <= gap


def test_fetches_join_what_touches_and_stop_at_the_bound() -> None:
    plan = functools.partial(plan_fetches, block_bytes=4, size_bytes=40)
    spans = [(8, 12), (0, 3), (4, 5), (30, 31)]
    found = plan(spans, max_bytes=100, gap_bytes=15)
    assert [(f.start, f.stop, f.members) for f in found] == [(0, 12, (1, 2, 0)), (28, 32, (3,))]
    (joined,) = plan(spans, max_bytes=100, gap_bytes=16)
    assert (joined.start, joined.stop, joined.members) == (0, 32, (1, 2, 0, 3))
    bounded = plan([(0, 4), (4, 8), (8, 12)], max_bytes=8, gap_bytes=0)
    assert [(f.start, f.stop) for f in bounded] == [(0, 8), (8, 12)]


@pytest.mark.parametrize(
    ("spans", "by_pieces", "read"),
    [
        ([(10, 960)], False, [(0, 1000)]),  # all tensors: the table would save nothing
        ([(10, 150)], True, [(10, 150)]),  # 140 + table of 40 + 2 requests of 15, against 200 + 15
        ([(10, 160)], False, [(0, 200)]),
        ([(10, 20), (50, 80)], False, [(0, 100)]),
        ([(0, 110), (400, 420)], True, [(0, 110), (400, 420)]),
    ],
)
def test_pieces_are_read_where_that_costs_less_than_blocks(
    spans: list[tuple[int, int]], by_pieces: bool, read: list[tuple[int, int]]
) -> None:
    table = CrcTable(begin=960, piece_bytes=10, crc32=0)
    segment = Segment(key="s", size_bytes=1000, block_bytes=100, crcs=(), table=table)
    found = plan_reads(spans, segment, max_bytes=2000, request_bytes=15)
    assert found[0] == by_pieces
    assert [(fetch.start, fetch.stop) for fetch in found[1]] == read
    assert not plan_reads(spans, replace(segment, table=None), max_bytes=2000, request_bytes=15)[0]
