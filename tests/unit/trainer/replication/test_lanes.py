"""The fixed tree and the dealing of lanes: the same bits whoever computes what."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.replication.lane_sums import LaneSums
from trainer.replication.lanes import Node, blocks_of, deal_lanes, split, sum_tree
from trainer.replication.step_commit import LaneStats

LENGTH = 33
STATS = LaneStats(tokens=0, digest=0)

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


def random_vectors(seed: int, count: int) -> list[Vector]:
    """Exponents 40 apart, so that almost any other order of the sum rounds differently."""
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.integers(-20, 20, (count, LENGTH)))
    return list((rng.standard_normal((count, LENGTH)) * spread).astype(np.float32))


def tree_sum(vectors: list[Vector]) -> Vector:
    """The definition: halves at the largest power of two below the count."""
    if len(vectors) == 1:
        return vectors[0]
    half = 1
    while 2 * half < len(vectors):
        half *= 2
    return tree_sum(vectors[:half]) + tree_sum(vectors[half:])


def tree_nodes(node: Node) -> set[Node]:
    if node[1] - node[0] == 1:
        return {node}
    left, right = split(node)
    return {node} | tree_nodes(left) | tree_nodes(right)


@pytest.mark.parametrize(
    ("node", "children"),
    [
        ((0, 2), ((0, 1), (1, 2))),
        ((0, 3), ((0, 2), (2, 3))),
        ((0, 4), ((0, 2), (2, 4))),
        ((0, 5), ((0, 4), (4, 5))),
        ((0, 8), ((0, 4), (4, 8))),
        ((0, 9), ((0, 8), (8, 9))),
        ((4, 7), ((4, 6), (6, 7))),
    ],
)
def test_a_node_splits_at_the_largest_power_of_two(node: Node, children: tuple[Node, Node]) -> None:
    assert split(node) == children


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(for each lane the replica that computes it, an order in which the lanes come in)."""
    total = draw(st.integers(1, 9))
    owners = draw(st.lists(st.integers(0, 8), min_size=total, max_size=total))
    return owners, draw(st.permutations(range(total)))


@settings(deadline=None)
@given(
    partition=partitions(),
    seed=st.integers(0, 2**32),
    most=st.sampled_from([None, 1, 2]),
)
def test_any_partition_in_any_order_gives_the_same_bits(
    partition: tuple[list[int], list[int]], seed: int, most: int | None
) -> None:
    owners, order = partition
    total = len(owners)
    vectors = random_vectors(seed, total)
    parts: dict[Node, torch.Tensor] = {}
    for replica in set(owners):
        mine = [lane for lane in order if owners[lane] == replica]
        sums = LaneSums(total, LENGTH, torch.device("cpu"), most=most)
        assert sums.begin(0, mine, torch.zeros(LENGTH), alone=False) == mine
        for lane in mine:
            sums.open(lane).copy_(torch.from_numpy(vectors[lane]))
            sums.settle(LENGTH)
            sums.close(lane, STATS, torch.zeros(()))
        assert set(sums.blocks) == set(blocks_of(mine, total))
        parts.update(sums.blocks)
    result = sum_tree(parts, (0, total), torch.add)
    assert result.numpy().tobytes() == tree_sum(vectors).tobytes()


def test_the_order_of_a_sum_shows_in_its_bits() -> None:
    """What the property above rests on: with these numbers a wrong order would be seen."""
    vectors = random_vectors(0, 8)
    in_line = np.add.reduce([*vectors], axis=0)
    assert in_line.tobytes() != tree_sum(vectors).tobytes()
    np.testing.assert_allclose(in_line, tree_sum(vectors), rtol=1e-3)


def test_partial_sums_are_added_left_to_right() -> None:
    parts = {(4, 5): "4", (0, 2): "01", (2, 3): "2", (3, 4): "3"}
    assert sum_tree(parts, (0, 5), lambda left, right: f"({left}+{right})") == "((01+(2+3))+4)"
    assert sum_tree({(0, 3): 7}, (0, 3), operator.add) == 7


@settings(deadline=None)
@given(total=st.integers(1, 17), data=st.data())
def test_blocks_are_the_largest_whole_subtrees(total: int, data: st.DataObject) -> None:
    mine = data.draw(st.sets(st.integers(0, total - 1)))
    blocks = blocks_of(mine, total)
    assert [lane for node in blocks for lane in range(*node)] == sorted(mine)
    nodes = tree_nodes((0, total))
    assert set(blocks) <= nodes
    whole = {node for node in nodes if set(range(*node)) <= mine}
    for lo, hi in blocks:
        assert not any(a <= lo and hi <= b and (a, b) != (lo, hi) for a, b in whole)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_a_power_of_two_of_replicas_sends_one_buffer_each(replicas: int) -> None:
    dealt = deal_lanes(8, tuple(range(replicas)))
    assert all(len(blocks_of(lanes, 8)) == 1 for lanes in dealt.values())


replica_sets = st.lists(st.integers(0, 20), min_size=1, max_size=9, unique=True).map(tuple)


@settings(deadline=None)
@given(total=st.integers(1, 16), replicas=replica_sets)
def test_a_fresh_deal_is_even_and_complete(total: int, replicas: tuple[int, ...]) -> None:
    dealt = deal_lanes(total, replicas)
    assert tuple(dealt) == replicas
    assert [lane for replica in replicas for lane in dealt[replica]] == list(range(total))
    loads = [len(lanes) for lanes in dealt.values()]
    assert max(loads) - min(loads) <= 1
    assert loads == sorted(loads, reverse=True)


@settings(deadline=None)
@given(total=st.integers(1, 16), rounds=st.lists(replica_sets, min_size=2, max_size=5))
def test_a_sticky_deal_keeps_what_replicas_have(total: int, rounds: list[tuple[int, ...]]) -> None:
    before = deal_lanes(total, rounds[0])
    for replicas in rounds[1:]:
        dealt = deal_lanes(total, replicas, before)
        assert set(dealt) == set(replicas)
        assert sorted(lane for lanes in dealt.values() for lane in lanes) == list(range(total))
        fewest = min(map(len, dealt.values()))
        for replica, lanes in dealt.items():
            kept = set(before.get(replica, ()))
            assert list(lanes) == sorted(lanes)
            assert kept <= set(lanes)
            assert set(lanes) == kept or len(lanes) <= fewest + 1
        before = dealt


def test_only_the_lost_lanes_are_dealt_again() -> None:
    before = {0: (0, 1), 1: (2, 3), 2: (4,), 3: (5,)}
    assert deal_lanes(6, (0, 2, 3), before) == {0: (0, 1), 2: (2, 4), 3: (3, 5)}
    assert deal_lanes(6, (0, 1, 2, 3), before) == before
