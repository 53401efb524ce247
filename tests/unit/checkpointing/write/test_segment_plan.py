"""A writer plans once: equal slices that come from another process find the plan made before."""

from __future__ import annotations

import pickle

from checkpointing import TensorSlice
from checkpointing.write.segment_plan import plan_packing, plan_parts


def slices(rows: int = 40) -> tuple[TensorSlice, ...]:
    return tuple(
        TensorSlice(name, (rows, 25), dtype, (0, 0), (rows, 25))
        for name, dtype in (("a", "bfloat16"), ("b", "float32"))
    )


def test_equal_slices_are_planned_once() -> None:
    sent = pickle.loads(pickle.dumps(slices()))  # as from another process
    first = plan_parts(slices(), 1 << 20)
    assert plan_parts(sent, 1 << 20) is first
    assert plan_parts(slices(41), 1 << 20) is not first
    assert plan_parts(slices(), 1 << 11) is not first
    segments = plan_packing(first.parts, frozenset(), 1 << 20, 1024)
    assert plan_packing(sent, frozenset(), 1 << 20, 1024) is segments
    assert plan_packing(sent, frozenset(sent[:1]), 1 << 20, 1024) is not segments
    assert plan_packing(sent, frozenset(), 1 << 20, None) is not segments


def test_parts_are_where_their_slice_lies_and_each_is_in_one_segment() -> None:
    plan = plan_parts(slices(), 1000)
    assert plan.needed_bytes == 2048 + 4032  # 2,000 and 4,000 bytes, in steps of 64
    assert list(plan.places) == [0, 1000, 2048, 3048, 4048, 5048]
    segments = plan_packing(plan.parts, frozenset(), 1000, None)
    assert sorted(m for segment in segments for m in segment.members) == list(range(6))
    assert [segment.parts[0].dtype for segment in segments] == ["float32"] * 4 + ["bfloat16"] * 2
    assert segments[0].parts[0] == plan.parts[segments[0].members[0]]


def test_parts_that_stand_still_have_segments_of_their_own() -> None:
    plan = plan_parts(slices(), 1 << 20)
    still = frozenset(part for part in plan.parts if part.name == "a")
    first, second = plan_packing(plan.parts, still, 1 << 20, None)
    assert {part.name for part in first.parts} == {"a"}
    assert {part.name for part in second.parts} == {"b"}
