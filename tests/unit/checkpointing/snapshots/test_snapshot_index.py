from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import (
    Manifest,
    Receipt,
    Segment,
    SliceError,
    Snapshot,
    SnapshotIndex,
    Stock,
    TensorInfo,
    find_newest,
    plan_other_node,
)
from checkpointing.format.boxes import Box
from tests.support.slice_tables import slice_table

RANKS = 2


def part(rank: int, step: int, generation: int = 1, rows: int = 1) -> Receipt:
    """Row `rank` of a tensor of two rows of four bytes."""
    key = f"d/{rank}/{step}-{generation}"
    row = Box("w", (rank, 0), (rows, 1))
    return Receipt(
        rank=rank,
        step=step,
        generation=generation,
        attempt=0,
        slices=slice_table({"w": TensorInfo((RANKS, 1), "float32")}, [row], key),
        segments=(Segment(key=key, size_bytes=12, block_bytes=4096, crcs=(1,)),),
    )


def index(**settings: Any) -> SnapshotIndex:
    return SnapshotIndex(versions={"torch": "2"}, **settings)


def take(
    to: SnapshotIndex, step: int, generation: int = 1, nodes: Iterable[str] = ("a", "b")
) -> Snapshot | None:
    """All parts of a snapshot; the first lies on `nodes`, the second on `b` and `c`."""
    assert to.add(part(0, step, generation), {"step": step}, nodes, RANKS) is None
    return to.add(part(1, step, generation), {"step": step}, ("b", "c"), RANKS)


def test_a_snapshot_is_whole_with_its_last_part() -> None:
    snapshots = index()
    whole = take(snapshots, 4)
    assert whole is not None and whole == snapshots.newest({"a", "b", "c"})
    assert (whole.step, whole.copies, whole.size_bytes) == (4, 2, 24)
    assert whole.nodes == {"a", "b", "c"}
    assert whole.manifest.training_state == {"step": 4}
    assert set(whole.manifest.segments) == {"d/0/4-1", "d/1/4-1"}


@pytest.mark.parametrize(
    ("live", "readable"),
    [({"b"}, True), ({"a", "c"}, True), ({"a"}, False), ({"c", "d"}, False), (set(), False)],
)
def test_it_is_readable_while_each_part_has_a_live_holder(live: set[str], readable: bool) -> None:
    snapshots = index()
    take(snapshots, 4)
    assert (snapshots.newest(live) is not None) is readable


def test_a_newer_one_replaces_it_and_older_ones_come_too_late() -> None:
    snapshots = index()
    snapshots.add(part(0, 2), {}, ("a",), RANKS)
    take(snapshots, 4)
    assert snapshots.add(part(1, 2), {}, ("a",), RANKS) is None
    assert take(snapshots, 4, generation=2) is None, "the same state again"
    newer = take(snapshots, 6)
    assert newer is not None and snapshots.whole is newer


def test_parts_that_do_not_tile_the_state_are_refused() -> None:
    snapshots = index()
    snapshots.add(part(0, 2, rows=2), {}, ("a",), RANKS)
    with pytest.raises(SliceError):
        snapshots.add(part(1, 2), {}, ("a",), RANKS)
    assert snapshots.newest({"a"}) is None


def test_what_was_taken_before_the_run_went_back_does_not_count() -> None:
    snapshots = index()
    take(snapshots, 8)
    snapshots.add(part(0, 10), {}, ("a",), RANKS)
    snapshots.went_back(4, generation=3)
    assert snapshots.whole is None
    assert snapshots.add(part(1, 10), {}, ("a",), RANKS) is None
    assert take(snapshots, 6, generation=2) is None, "a straggler"
    assert take(snapshots, 6, generation=3) is not None


def test_what_was_swept_is_never_whole() -> None:
    """One worker is a snapshot ahead of another, and has no room: its part of the one before goes
    too."""
    snapshots = index()
    whole = take(snapshots, 4)
    snapshots.add(part(0, 6), {}, ("a",), RANKS)
    snapshots.swept(8, generation=1)
    snapshots.swept(5, generation=1)
    assert snapshots.add(part(1, 6), {}, ("b",), RANKS) is None
    assert take(snapshots, 8) is None
    assert snapshots.whole is whole
    assert take(snapshots, 7, generation=2) is not None, "it was spared"
    assert take(snapshots, 9) is not None


def test_a_run_that_goes_back_takes_swept_steps_again() -> None:
    snapshots = index()
    snapshots.swept(8, generation=1)
    snapshots.went_back(4, generation=2)
    assert take(snapshots, 6, generation=2) is not None


def test_going_back_to_a_snapshot_keeps_it() -> None:
    snapshots = index()
    whole = take(snapshots, 8)
    snapshots.went_back(8, generation=2)
    assert snapshots.newest({"b"}) is whole
    snapshots.forget()
    assert snapshots.newest({"b"}) is None


@given(st.sets(st.text("abcdef", min_size=1, max_size=2), min_size=2))
def test_the_ring_gives_each_node_one_other_and_the_load_is_even(nodes: set[str]) -> None:
    others = [plan_other_node(node, nodes) for node in nodes]
    assert set(others) == nodes
    assert all(other != node for node, other in zip(nodes, others, strict=True))


def test_a_node_alone_has_no_other() -> None:
    assert plan_other_node("a", {"a"}) is None
    assert plan_other_node("a", ()) is None


def manifest(step: int, generation: int) -> Manifest:
    snapshot = take(index(), step, generation)
    assert snapshot is not None
    return snapshot.manifest


def stock(*manifests: Manifest, **sizes: int) -> Stock:
    """`s0_4_1=12`: 12 bytes of the segment of rank 0, step 4, generation 1."""
    keys = {name: name.removeprefix("s").split("_") for name in sizes}
    held = {f"d/{rank}/{step}-{g}": sizes[name] for name, (rank, step, g) in keys.items()}
    return Stock(manifests=manifests, sizes=held)


def test_a_new_start_takes_the_newest_that_is_there_in_full() -> None:
    four, six = manifest(4, 1), manifest(6, 1)
    stocks = {
        "a": stock(six, s0_4_1=12, s0_6_1=12),
        "b": stock(four, s1_4_1=12, s1_6_1=11),
    }
    found = find_newest(stocks)
    assert found is not None and found.manifest == four, "of 6 a part is cut short"
    assert found.places == {"d/0/4-1": {"a"}, "d/1/4-1": {"b"}}
    stocks["c"] = stock(s1_6_1=12)
    found = find_newest(stocks)
    assert found is not None and found.manifest == six
    assert found.places == {"d/0/6-1": {"a"}, "d/1/6-1": {"c"}}
    assert find_newest({}) is None


def test_a_new_start_leaves_what_the_run_had_gone_back_behind() -> None:
    stocks = {
        "a": stock(manifest(8, 1), manifest(6, 2), s0_8_1=12, s1_8_1=12, s0_6_2=12, s1_6_2=12)
    }
    for went_back, step in (((), 8), ([(2, 4)], 6), ([(2, 8)], 8), ([(2, 4), (3, 0)], None)):
        found = find_newest(stocks, went_back)
        assert (found.step if found else None) == step
