"""Tables of nodes with free workers, and who of them form replicas."""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.membership.topology import Spread, find_spread, holds_together, plan_seats
from elastic.protocol.messages import Identity


def table(*rows: str) -> list[Identity]:
    """One row for each node: `a: 0 1 4` has the workers of these ranks, named a0, a1, a4."""
    found = []
    for row in rows:
        node, ranks = row.split(":")
        found += [
            Identity(worker=f"{node}{rank}", rank=int(rank), node=node, pid=1)
            for rank in ranks.split()
        ]
    return found


def seats(*rows: str, size: int, together: int = 1, most: int = 9) -> list[str]:
    found = plan_seats(table(*rows), size=size, together=together, most=most)
    return [" ".join(seat) for seat in found]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Whole nodes, in order of rank.
        (("a: 0 1", "b: 2 3"), ["a0 a1", "b2 b3"]),
        (("b: 0 1", "a: 2 3"), ["b0 b1", "a2 a3"]),
        # A dead GPU on a, whose last worker was 1, and a spare on c: b is whole.
        (("a: 0", "b: 2 3", "c: 4"), ["b2 b3", "a0 c4"]),
        # Not by rank alone, which would give a0 b1.
        (("a: 0 3", "b: 1 2"), ["a0 a3", "b1 b2"]),
        # The fullest node that has room: c is left for something larger.
        (("c: 0 1 2", "a: 3 4"), ["a3 a4", "c0 c1"]),
        (("a: 0 1 2 3 4",), ["a0 a1", "a2 a3"]),
        ((), []),
        (("a: 0",), []),
    ],
)
def test_two_workers_on_one_node_where_one_has_them(
    rows: tuple[str, ...], expected: list[str]
) -> None:
    assert seats(*rows, size=2) == expected


def test_there_are_no_more_than_there_is_room_for() -> None:
    rows = "a: 0 1", "b: 2 3", "c: 4 5"
    assert seats(*rows, size=2, most=2) == ["a0 a1", "b2 b3"]
    assert seats(*rows, size=2, most=0) == seats(*rows, size=2, most=-1) == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Two whole nodes, and not the three of the lowest ranks.
        (("a: 0 1", "b: 2 3 4 5", "c: 6 7 8 9"), ["b2 b3 b4 b5 c6 c7 c8 c9"]),
        # The rest of it where it fits best.
        (
            ("a: 0 1 2 3 4 5", "b: 6 7 8", "c: 9 10", "d: 11 12 13"),
            ["a0 a1 a2 a3 a4 a5 c9 c10"],
        ),
        (("a: 0 1 2 3", "b: 4 5", "c: 6", "d: 7"), ["a0 a1 a2 a3 b4 b5 c6 d7"]),
    ],
)
def test_eight_workers_on_as_few_nodes_as_can_be(
    rows: tuple[str, ...], expected: list[str]
) -> None:
    assert seats(*rows, size=8) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (("a: 0 1", "b: 2 3"), ["a0 a1 b2 b3"]),
        (("a: 0 1 2", "b: 3 4 5"), ["a0 a1 b3 b4"]),
        (("a: 0", "b: 1 2 3"), []),
        (("a: 0", "b: 1", "c: 2", "d: 3"), []),
        (("a: 0", "b: 1 2 3", "c: 4 5"), ["b1 b2 c4 c5"]),
    ],
)
def test_tensor_groups_of_two_stay_on_one_node(rows: tuple[str, ...], expected: list[str]) -> None:
    """The replica is shard 2 x tensor 2: its first two workers are a group."""
    assert seats(*rows, size=4, together=2) == expected


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 3), (12, 4)]),
    st.integers(0, 5),
)
def test_any_table(counts: list[int], sizes: tuple[int, int], most: int) -> None:
    size, together = sizes
    ranks = iter(range(sum(counts)))
    rows = [
        f"n{i}: " + " ".join(str(next(ranks)) for _ in range(count))
        for i, count in enumerate(counts)
    ]
    members = {one.worker: one for one in table(*rows)}
    found = plan_seats(members.values(), size=size, together=together, most=most)
    # As many as the tensor groups that the nodes hold are enough for.
    groups = sum(count // together for count in counts)
    assert len(found) == min(most, groups // (size // together))
    assert all(len(seat) == size for seat in found)
    used = Counter(chain(*found))
    assert not used or max(used.values()) == 1
    spreads = [find_spread(seat, members, together) for seat in found]
    assert all(spread.split == 0 for spread in spreads)
    # Nodes have room for so many whole ones.
    assert sum(s.nodes == 1 for s in spreads) == min(most, sum(c // size for c in counts))


def test_how_far_a_replica_reaches() -> None:
    members = {one.worker: one for one in table("a: 0 1 2", "b: 3 4", "c: 5")}
    assert find_spread(("a0", "a1"), members, 2) == Spread(split=0, nodes=1)
    assert find_spread(("a0", "a1", "b3", "b4"), members, 2) == Spread(split=0, nodes=2)
    assert find_spread(("a0", "b3", "a1", "b4"), members, 2) == Spread(split=2, nodes=2)
    assert find_spread(("a0", "b3", "a1", "b4"), members, 1) == Spread(split=0, nodes=2)
    better, worse = Spread(split=0, nodes=3), Spread(split=1, nodes=2)
    assert better < worse and Spread(split=0, nodes=2) < better


def test_whether_a_node_holds_a_tensor_group() -> None:
    members = table("a: 0 1", "b: 2")
    assert holds_together(members, 2) and not holds_together(members, 3)
    assert not holds_together([], 1)


def test_a_large_run_is_seated_in_a_moment() -> None:
    rows = [f"n{i}: " + " ".join(str(8 * i + j) for j in range(8)) for i in range(2048)]
    pool = table(*rows)
    began = time.process_time()
    found = plan_seats(pool, size=64, together=8, most=256)
    assert len(found) == 256 and time.process_time() - began < 2, "0.1 s"
    assert found[1][0] == "n864", "neighbours"
