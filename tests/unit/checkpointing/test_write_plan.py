"""A writer plans once: equal slices that come from another process find the plan made before."""

from __future__ import annotations

import pickle

from checkpointing import TensorSlice
from checkpointing.write_plan import plan_shared


def slices(rows: int = 40) -> tuple[TensorSlice, ...]:
    return tuple(
        TensorSlice(name, (rows, 25), dtype, (0, 0), (rows, 25))
        for name, dtype in (("a", "bfloat16"), ("b", "float32"))
    )


def test_equal_slices_are_planned_once() -> None:
    first = plan_shared(slices(), 1 << 20, 1024)
    assert plan_shared(pickle.loads(pickle.dumps(slices())), 1 << 20, 1024) is first
    for other in (
        (slices(41), 1 << 20, 1024),
        (slices(), 1 << 11, 1024),
        (slices(), 1 << 20, None),
    ):
        assert plan_shared(*other) is not first


def test_parts_are_where_their_slice_lies_and_each_is_in_one_segment() -> None:
    plan = plan_shared(slices(), 1000, None)
    assert plan.needed_bytes == 2048 + 4032  # 2,000 and 4,000 bytes, in steps of 64
    assert list(plan.places) == [0, 1000, 2048, 3048, 4048, 5048]
    assert sorted(m for segment in plan.segments for m in segment.members) == list(range(6))
    assert [segment.parts[0].dtype for segment in plan.segments] == ["float32"] * 4 + [
        "bfloat16"
    ] * 2
    assert plan.segments[0].parts[0] == plan.parts[plan.segments[0].members[0]]
