"""A worker's lane gradients: kept through an interruption, dropped when they no longer count."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import pytest
import torch

from tests.support.lane_gradients import COUNT, lane_gradients
from trainer.replication.lane_sums import LaneSums, gradient_digests
from trainer.replication.lanes import blocks_of, sum_tree
from trainer.replication.step_commit import LaneStats

LENGTH = 4


def make(total: int = 4, most: int | None = None) -> LaneSums:
    return LaneSums(total, LENGTH, torch.device("cpu"), most=most)


def begin(
    sums: LaneSums,
    step: int,
    lanes: Sequence[int],
    home: torch.Tensor | None = None,
    *,
    alone: bool = False,
) -> list[int]:
    return sums.begin(step, lanes, torch.zeros(LENGTH) if home is None else home, alone=alone)


def add(sums: LaneSums, *lanes: int) -> None:
    """Lane n's gradient is 10**n in the first three places; the fourth is padding."""
    for lane in lanes:
        sums.open(lane)[:3] = 10.0**lane
        sums.settle(3)
        sums.close(lane, LaneStats(tokens=1, digest=lane), torch.tensor(float(lane)))


def values(sums: LaneSums) -> dict[tuple[int, int], float]:
    assert all(
        block[3] == 0 and len(set(block[:3].tolist())) == 1 for block in sums.blocks.values()
    )
    return {node: block[0].item() for node, block in sums.blocks.items()}


def test_whole_subtrees_are_added_up_as_they_become_whole() -> None:
    sums = make()
    begin(sums, 0, (0, 1, 2, 3))
    add(sums, 1)
    assert values(sums) == {(1, 2): 10}
    add(sums, 2)
    assert values(sums) == {(1, 2): 10, (2, 3): 100}
    add(sums, 0)
    assert values(sums) == {(0, 2): 11, (2, 3): 100}
    add(sums, 3)
    assert values(sums) == {(0, 4): 1111}


def test_a_repeated_step_asks_for_the_missing_lanes_only() -> None:
    sums = make()
    assert begin(sums, 5, (0, 1)) == [0, 1]
    add(sums, 0)
    assert begin(sums, 5, (0, 1, 3)) == [1, 3]
    add(sums, 1, 3)
    assert begin(sums, 5, (0, 1, 3)) == []
    assert values(sums) == {(0, 2): 11, (3, 4): 1000}
    assert {lane: stats.digest for lane, stats in sums.stats.items()} == {0: 0, 1: 1, 3: 3}


def test_another_step_starts_anew() -> None:
    sums = make()
    begin(sums, 5, (0, 1))
    add(sums, 0, 1)
    assert begin(sums, 6, (0, 1)) == [0, 1]
    assert (sums.blocks, sums.stats, sums.step) == ({}, {}, 6)
    add(sums, 1)
    assert values(sums) == {(1, 2): 10}


def test_sums_with_a_lane_of_somebody_else_are_dropped() -> None:
    sums = make()
    begin(sums, 5, (0, 1))
    add(sums, 0, 1)
    assert begin(sums, 5, (1, 2)) == [1, 2]
    assert (sums.blocks, sums.stats) == ({}, {})


def test_a_cleared_step_is_computed_again() -> None:
    sums = make()
    begin(sums, 5, (0,))
    add(sums, 0)
    sums.clear()
    assert begin(sums, 5, (0,)) == [0]


def test_a_step_of_eight_lanes_takes_four_buffers_and_later_steps_reuse_them() -> None:
    sums, places, home = make(8), set(), torch.zeros(LENGTH)
    for step in range(3):
        begin(sums, step, range(8), home)
        for lane in range(8):
            buffer = sums.open(lane)
            places.add(buffer.data_ptr())
            buffer[:3] = 1.0
            sums.settle(3)
            sums.close(lane, LaneStats(tokens=0, digest=0), torch.zeros(()))
        assert values(sums) == {(0, 8): 8}
    assert len(places) == 4


def test_a_lane_is_added_up_range_by_range_as_it_comes_in() -> None:
    sums = make()
    begin(sums, 0, (0, 1, 2, 3))
    add(sums, 0, 1, 2)
    last = sums.open(3)
    assert set(sums.blocks) == {(0, 4)}
    total = sums.blocks[0, 4]
    last[0] = 1000
    sums.settle(1)
    assert total[0] == 1111
    last[1:3] = 1000
    sums.settle(2)
    assert total.tolist() == [1111, 1111, 11, 0]
    sums.settle(3)
    assert total.tolist() == [1111, 1111, 1111, 0]
    assert begin(sums, 0, (0, 1, 2, 3)) == [3]  # until it is closed
    sums.close(3, LaneStats(tokens=0, digest=0), torch.zeros(()))
    assert begin(sums, 0, (0, 1, 2, 3)) == []


def buffers(sums: LaneSums, home: torch.Tensor) -> set[int]:
    """Those of a gradient's size that a worker has now."""
    return {block.data_ptr() for block in (home, *sums.blocks.values(), *sums._free)}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("lanes", "expected"), [(1, 1), (2, 2), (4, 3), (8, 4), (3, 2), (7, 3)])
def test_buffers_of_a_replica_with_the_reduced_gradient_among_them(
    lanes: int, expected: int, alone: bool
) -> None:
    home, sums = torch.zeros(LENGTH), make(lanes if alone else 16)
    held: set[int] = set()
    for step in range(3):
        assert begin(sums, step, range(lanes), home, alone=alone) == list(range(lanes))
        for lane in range(lanes):
            add(sums, lane)
            held |= buffers(sums, home)
        assert sum(values(sums).values()) == sum(10.0**lane for lane in range(lanes))
        in_home = [block for block in sums.blocks.values() if block is home]
        assert bool(in_home) == (alone or lanes in (1, 3, 7)), "only what cannot be added up"
    assert len(held) == expected


def on_device(sums: LaneSums, home: torch.Tensor) -> set[int]:
    held = (block for node, block in sums.blocks.items() if node not in sums._waiting)
    return {block.data_ptr() for block in (home, *held, *sums._free)}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("lanes", [1, 3, 7, 8])
def test_lanes_beyond_the_limit_wait_on_the_host(lanes: int, most: int, alone: bool) -> None:
    home, sums = torch.zeros(LENGTH), make(lanes if alone else 16, most)
    on_host: list[set[int]] = []
    for step in range(3):
        assert begin(sums, step, range(lanes), home, alone=alone) == list(range(lanes))
        for lane in range(lanes):
            add(sums, lane)
            assert len(on_device(sums, home)) <= most
        assert sum(values(sums).values()) == sum(10.0**lane for lane in range(lanes))
        assert not alone or (sums.blocks[0, lanes] is home and not sums._waiting)
        there = (*sums._waiting.values(), *sums._free_on_host)
        on_host.append({block.data_ptr() for block in there})
    assert on_host[0] == on_host[2], "the host's memory is used again"
    needed = {1: 1, 3: 2, 7: 3, 8: 4}[lanes]
    assert bool(on_host[0]) == (needed > most)


def test_the_first_lane_on_the_host_finds_its_memory_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = make(2, most=1)
    sums.reserve_on_host()
    monkeypatch.delattr(LaneSums, "_new_on_host")
    begin(sums, 0, (0, 1))
    add(sums, 0, 1)
    assert values(sums) == {(0, 2): 11}


def test_a_lane_that_waits_on_the_host_is_not_written_over() -> None:
    home, sums = torch.zeros(LENGTH), make(4, 1)
    begin(sums, 3, (0,), home)
    add(sums, 0)
    assert begin(sums, 3, (0, 3), home) == [3]  # of a replica that was lost before the sum came
    add(sums, 3)
    assert values(sums) == {(0, 1): 1, (3, 4): 1000} and set(sums._waiting) == {(0, 1)}
    home[:3] = -1
    sums.overwritten = True
    assert begin(sums, 3, (0, 3), home) == [3]
    add(sums, 3)
    assert values(sums) == {(0, 1): 1, (3, 4): 1000}


def test_lanes_that_were_added_up_in_home_are_computed_again() -> None:
    home, sums = torch.zeros(LENGTH), make(4, 1)
    begin(sums, 3, (0, 1), home)
    add(sums, 0, 1)
    assert sums.blocks[0, 2] is home
    sums.overwritten = True
    assert begin(sums, 3, (0, 1), home) == [0, 1]


def fewest_buffers(lanes: int) -> int:
    """The fewest that any order of the lanes takes, by trying all of them."""

    @functools.cache
    def of(done: frozenset[int]) -> int:
        ways = [
            max(len(blocks_of(done, lanes)) + 1, of(done | {lane}))
            for lane in set(range(lanes)) - done
        ]
        return min(ways, default=0)

    return of(frozenset())


@pytest.mark.parametrize("depth", range(4))
def test_no_order_of_the_lanes_takes_fewer_buffers(depth: int) -> None:
    assert fewest_buffers(2**depth) == depth + 1


def test_a_lane_that_the_sum_was_written_over_is_computed_again() -> None:
    home, sums = torch.zeros(LENGTH), make(4)
    begin(sums, 3, (2,), home)
    add(sums, 2)
    assert values(sums) == {(2, 3): 100} and sums.blocks[2, 3] is home
    assert begin(sums, 3, (2,), home) == []  # nothing was written
    sums.overwritten = True
    assert begin(sums, 3, (1, 2), home) == [1, 2]
    assert (sums.blocks, sums.stats, sums.losses) == ({}, {}, {})
    add(sums, 1, 2)
    assert values(sums) == {(1, 2): 10, (2, 3): 100}


def test_lanes_that_were_added_up_outlive_the_sum() -> None:
    home, sums = torch.zeros(LENGTH), make(4)
    begin(sums, 3, (0, 1), home)
    add(sums, 0, 1)
    home.fill_(-1)  # by the reduction over all replicas
    sums.overwritten = True
    assert begin(sums, 3, (0, 1, 2, 3), home) == [2, 3]
    assert values(sums) == {(0, 2): 11}
    add(sums, 2, 3)
    assert values(sums) == {(0, 4): 1111}
    home.fill_(-1)
    assert values(sums) == {(0, 4): 1111}


def test_what_no_abandoned_collective_writes_to_stays_where_it_is() -> None:
    """The reduced gradient has got another buffer, and the lane in the old one was not written
    over."""
    old, new, sums = torch.zeros(LENGTH), torch.zeros(LENGTH), make(2)
    begin(sums, 3, (0,), old)
    add(sums, 0)
    assert begin(sums, 3, (0, 1), new) == [1]
    add(sums, 1)
    assert values(sums) == {(0, 2): 11}
    assert sums.blocks[0, 2] is old and (new[:3] == 10).all()


def test_a_step_that_goes_on_alone_keeps_what_it_has() -> None:
    home, sums = torch.zeros(LENGTH), make(2)
    begin(sums, 3, (0,), home)
    add(sums, 0)
    assert begin(sums, 3, (0, 1), home, alone=True) == [1]
    add(sums, 1)
    assert values(sums) == {(0, 2): 11} and home[0] == 11
    assert begin(sums, 4, (0, 1), home, alone=True) == [0, 1]
    add(sums, 0, 1)
    assert values(sums) == {(0, 2): 11} and home[0] == 11


def test_each_lane_and_each_sum_is_rounded_to_what_is_sent() -> None:
    total = 7
    lanes = lane_gradients(total)
    parts = {(lane, lane + 1): gradient.bfloat16() for lane, gradient in enumerate(lanes)}
    expected = sum_tree(parts, (0, total), torch.add).float()
    home, sums = torch.zeros(COUNT), LaneSums(total, COUNT, torch.device("cpu"), torch.bfloat16)
    for lane in begin(sums, 0, range(total), home, alone=True):
        sums.open(lane)[:] = lanes[lane]
        sums.settle(1)
        sums.settle(COUNT)
        sums.close(lane, LaneStats(tokens=1, digest=lane), torch.zeros(()))
    assert home.numpy().tobytes() == expected.numpy().tobytes()


def test_a_lanes_digest_is_of_its_own_gradient_and_one_bit_changes_it() -> None:
    def digest(lane_3: torch.Tensor, bounds: Sequence[int], others: Sequence[int]) -> float:
        sums = make()
        begin(sums, 0, (*others, 3))
        add(sums, *others)
        sums.open(3)[:3] = lane_3
        for stop in bounds:
            sums.settle(stop)
        sums.close(3, LaneStats(tokens=1, digest=3), torch.zeros(()))
        return gradient_digests([sums.gradients[3]])[0].item()

    gradient = torch.tensor([1.5, -2.0, 3e-9])
    low, high, last = struct.unpack("<3I", struct.pack("<3f", *gradient.tolist()))
    bits = (low + (high << 32) + last) % 2**64
    expected = bits & 0xFFFFFFFF ^ bits >> 32
    assert digest(gradient, [3], []) == expected
    assert digest(gradient, [1, 1, 2, 3, 3], [0, 1, 2]) == expected, (
        "also where it is added up at once"
    )
    for place in range(3):
        for bit in range(31):
            other = gradient.clone()
            other.view(torch.int32)[place] ^= 1 << bit
            assert digest(other, [3], [2]) != expected


def test_where_nobody_asks_for_digests_no_gradient_is_read_for_one() -> None:
    sums, home = LaneSums(2, LENGTH, torch.device("cpu"), traced=False), torch.zeros(LENGTH)
    begin(sums, 0, (0, 1), home)
    add(sums, 0, 1)
    assert values(sums) == {(0, 2): 11}
    assert torch.stack(gradient_digests(list(sums.gradients.values()))).tolist() == [0, 0]
