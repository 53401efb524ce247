"""A worker's lane gradients: kept through an interruption, dropped when they no longer count."""

from __future__ import annotations

import pytest
import torch

from trainer.replication.lane_sums import LaneSums
from trainer.replication.step_commit import LaneStats

LENGTH = 4


def make(total: int = 4) -> LaneSums:
    return LaneSums(total, LENGTH, torch.device("cpu"))


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
    sums.begin(0, (0, 1, 2, 3))
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
    assert sums.begin(5, (0, 1)) == [0, 1]
    add(sums, 0)
    assert sums.begin(5, (0, 1, 3)) == [1, 3]
    add(sums, 1, 3)
    assert sums.begin(5, (0, 1, 3)) == []
    assert values(sums) == {(0, 2): 11, (3, 4): 1000}
    assert {lane: stats.digest for lane, stats in sums.stats.items()} == {0: 0, 1: 1, 3: 3}


def test_another_step_starts_anew() -> None:
    sums = make()
    sums.begin(5, (0, 1))
    add(sums, 0, 1)
    assert sums.begin(6, (0, 1)) == [0, 1]
    assert (sums.blocks, sums.stats, sums.step) == ({}, {}, 6)
    add(sums, 1)
    assert values(sums) == {(1, 2): 10}


def test_sums_with_a_lane_of_somebody_else_are_dropped() -> None:
    sums = make()
    sums.begin(5, (0, 1))
    add(sums, 0, 1)
    assert sums.begin(5, (1, 2)) == [1, 2]
    assert (sums.blocks, sums.stats) == ({}, {})


def test_a_cleared_step_is_computed_again() -> None:
    sums = make()
    sums.begin(5, (0,))
    add(sums, 0)
    sums.clear()
    assert sums.begin(5, (0,)) == [0]


def test_a_step_of_eight_lanes_takes_four_buffers_and_later_steps_reuse_them() -> None:
    sums, places = make(8), set()
    for step in range(3):
        sums.begin(step, range(8))
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
    sums.begin(0, (0, 1, 2, 3))
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
    assert sums.begin(0, (0, 1, 2, 3)) == [3]  # until it is closed
    sums.close(3, LaneStats(tokens=0, digest=0), torch.zeros(()))
    assert sums.begin(0, (0, 1, 2, 3)) == []


@pytest.mark.parametrize(("lanes", "shared", "alone"), [(1, 2, 1), (2, 3, 2), (4, 4, 3), (8, 5, 4)])
def test_buffers_of_a_replica_that_has_all_lanes(lanes: int, shared: int, alone: int) -> None:
    """The reduced gradient counts; a replica among others has as many lanes and one more buffer."""
    for home, expected in ((None, shared), (torch.zeros(LENGTH), alone)):
        sums = make(lanes)
        held = {0 if home is None else home.data_ptr()}
        for step in range(3):
            assert sums.begin(step, range(lanes), home) == list(range(lanes))
            for lane in range(lanes):
                add(sums, lane)
                held |= {block.data_ptr() for block in sums.blocks.values()}
                held |= {block.data_ptr() for block in sums._free}
            ((node, total),) = values(sums).items()
            assert node == (0, lanes) and total == sum(10.0**lane for lane in range(lanes))
            if home is not None:
                assert home[0] == total
        assert len(held) == expected


def test_sums_move_out_where_other_replicas_join_in_the_step() -> None:
    home, sums = torch.zeros(LENGTH), make(2)
    sums.begin(3, (0, 1), home)
    add(sums, 0)
    assert sums.begin(3, (0,)) == []
    home.fill_(-1)  # by the reduction over all replicas
    assert values(sums) == {(0, 1): 1}
    sums.begin(4, (0,))
    add(sums, 0)
    home.fill_(-1)
    assert values(sums) == {(0, 1): 1}


def test_a_step_that_goes_on_alone_keeps_what_it_has() -> None:
    home, sums = torch.zeros(LENGTH), make(2)
    sums.begin(3, (0,))
    add(sums, 0)
    assert sums.begin(3, (0, 1), home) == [1]
    add(sums, 1)
    assert values(sums) == {(0, 2): 11} and home[0] == 0
    assert sums.begin(4, (0, 1), home) == [0, 1]
    add(sums, 0, 1)
    assert values(sums) == {(0, 2): 11} and home[0] == 11
