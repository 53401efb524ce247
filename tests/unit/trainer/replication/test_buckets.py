"""The layout of buckets: contiguous, none small, none large, with equal pieces for all replicas."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.replication.buckets import plan_bounds, plan_buckets

sizes = st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((5,), (5,)),  # a tiny model has one bucket
        ((10, 20, 30), (10, 20, 30)),
        ((4, 8, 12, 16), (16,)),
        ((4, 8, 12, 30), (12, 30)),
        ((10, 20, 25), (10, 25)),  # a small rest joins the bucket before it
        ((10, 50), (10, 30, 50)),  # a large group is cut
        ((10, 55), (10, 25, 40, 55)),
        ((20, 20), (20,)),  # an empty tail
    ],
)
def test_neighbours_are_merged_and_large_groups_cut(
    ends: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert plan_buckets(ends, least=10, most=20) == expected


@given(sizes=sizes, least=st.integers(1, 100), factor=st.integers(1, 4))
def test_buckets_cover_everything_once_within_their_limits(
    sizes: list[int], least: int, factor: int
) -> None:
    ends, most = list(accumulate(sizes)), least * factor
    buckets = plan_buckets(ends, least=least, most=most)
    lengths = [stop - start for start, stop in pairwise((0, *buckets))]
    assert buckets[-1] == ends[-1]
    assert all(length > 0 for length in lengths)
    assert max(lengths) <= most
    if ends[-1] >= least:
        assert min(lengths) >= least // 2  # halves of a group just above `most`


@given(sizes=sizes, replicas=st.integers(1, 9))
def test_bounds_give_every_replica_an_equal_piece(sizes: list[int], replicas: int) -> None:
    ends = plan_buckets(list(accumulate(sizes)), least=1, most=50)
    bounds = plan_bounds(ends, replicas)
    assert bounds[0] == 0 and len(bounds) == len(ends) + 1
    assert all((stop - start) % replicas == 0 for start, stop in pairwise(bounds))
    assert all(0 <= start <= stop for start, stop in pairwise(bounds))
    assert 0 <= bounds[-1] - ends[-1] < replicas
    # Nothing is reduced before it is there.
    assert all(bound <= end for bound, end in zip(bounds[1:-1], ends[:-1], strict=True))
