"""Replicas that hold the same slices share the writing: every byte once, in equal parts."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import TensorInfo, TensorSlice, check_coverage, plan_writers
from tests.support.slice_tables import slice_table

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1}

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def whole(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorSlice:
    return TensorSlice(name, shape, dtype, (0,) * len(shape), shape)


def bytes_of(part: TensorSlice) -> int:
    return math.prod(part.sizes) * ITEM_BYTES[part.dtype]


@settings(deadline=None, max_examples=200)
@given(
    tensors=st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=8),
    writers=st.integers(1, 5),
)
def test_the_shares_cover_everything_once(
    tensors: list[tuple[tuple[int, ...], str]], writers: int
) -> None:
    slices = [whole(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(tensors)]
    shares = plan_writers(slices, writers)
    assert len(shares) == writers
    table = {part.name: TensorInfo(part.global_shape, part.dtype) for part in slices}
    check_coverage(slice_table(table, [part for share in shares for part in share]))
    assert {part.name for share in shares for part in share} == set(table), "all are declared"
    rows = [bytes_of(p) / max(1, next((n for n in p.sizes if n > 1), 1)) for p in slices]
    equal = sum(map(bytes_of, slices)) / writers
    for share in shares:  # off by at most half a row at either end
        assert abs(sum(map(bytes_of, share)) - equal) <= max(rows, default=0) + 1


def test_one_large_tensor_does_not_go_to_one_writer() -> None:
    slices = [whole("embedding", (1000, 64)), whole("norm", (64,)), whole("bias", (64,))]
    shares = plan_writers(slices, 4)
    sizes = [sum(map(bytes_of, share)) for share in shares]
    assert sum(sizes) == 4 * (64_000 + 128)
    assert max(sizes) - min(sizes) <= 2 * 64 * 4
    assert [part.name for part in shares[3]] == ["embedding", "norm", "bias"]


def test_a_slice_is_cut_within_its_own_box() -> None:
    mine = TensorSlice("w", (8, 6), "float32", (4, 0), (4, 6))
    (first,), (second,) = plan_writers([mine], 2)
    assert (first.offsets, first.sizes) == ((4, 0), (2, 6))
    assert (second.offsets, second.sizes) == ((6, 0), (2, 6))
    row = TensorSlice("w", (8, 6), "float32", (4, 0), (1, 6))
    (first,), (second,) = plan_writers([row], 2)
    assert (first.offsets, first.sizes, second.offsets) == ((4, 0), (1, 3), (4, 3))


def test_a_single_writer_gets_it_as_it_is() -> None:
    slices = [whole("a", (3, 2)), whole("empty", (0, 2)), whole("scalar", ())]
    assert plan_writers(slices, 1) == [slices]
