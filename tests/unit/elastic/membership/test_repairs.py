"""Who takes the places that a replica has lost, by the nodes that workers are on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.membership.repairs import find_mendable, merge_remnants, plan_repairs
from elastic.protocol.messages import Identity
from elastic.protocol.roster import Remnant
from trainer.parallel.layout import ParallelDims


def on_nodes(nodes: Mapping[str, str]) -> dict[str, Identity]:
    return {
        worker: Identity(worker=worker, rank=rank, node=node, pid=rank)
        for rank, (worker, node) in enumerate(nodes.items())
    }


def by_rank(names: str) -> dict[int, str]:
    return {rank: name for rank, name in enumerate(names.split()) if name != "-"}


def list_remnants(kept: Sequence[str]) -> list[Remnant]:
    return [
        Remnant(index=index, formed=1 + index, workers=by_rank(names))
        for index, names in enumerate(kept)
    ]


def repair(dims: ParallelDims, kept: Sequence[str], idle: Mapping[str, str]) -> list[str]:
    """Replicas of workers that are named after their nodes, in capitals; "-" is lost.

    Args:
        dims: of each.
        kept: of each, by rank.
        idle: worker -> its node.
    """
    remnants = list_remnants(kept)
    nodes = {name: name[0].upper() for r in remnants for name in r.workers.values()} | dict(idle)
    whole = plan_repairs(remnants, list(idle), on_nodes(nodes), dims, 9)
    assert [replica.formed for replica in whole] == [9 + i for i in range(len(whole))]
    return [" ".join(replica.workers) for replica in sorted(whole, key=lambda r: r.index)]


TENSOR = ParallelDims(shard=2, tensor=2)
LEVELS = ParallelDims(shard=4, tensor=2, nodes=2)
CONTEXT = ParallelDims(shard=2, others=(("context", 2),))

FLAT = ParallelDims(shard=4)


@pytest.mark.parametrize(
    ("dims", "kept", "idle", "whole"),
    [
        # The peer's node, though a spare on another one of the replica is older.
        (TENSOR, "a0 a1 b0 -", {"sA": "A", "nB": "B"}, "a0 a1 b0 nB"),
        (CONTEXT, "a0 a1 b0 -", {"sA": "A", "nB": "B"}, "a0 a1 b0 nB"),
        # Two levels: a level's local positions are no neighbours in rank.
        (
            LEVELS,
            "a0 a1 - b1 - a3 b2 b3",
            {"nA": "A", "nB": "B"},
            "a0 a1 nB b1 nA a3 b2 b3",
        ),
        (LEVELS, "a0 a1 b0 b1 a2 a3 - -", {"a8": "A", "b8": "B", "a9": "A", "b9": "B"}, None),
        # A group that is lost as a whole, from the node that holds it.
        (
            ParallelDims(shard=2, tensor=4),
            "a0 a1 a2 a3 - - - -",
            {"x0": "X", "x1": "X", "y0": "Y", "y1": "Y", "y2": "Y", "y3": "Y"},
            "a0 a1 a2 a3 y0 y1 y2 y3",
        ),
        # And not from the remnant's, where that has no room for it.
        (TENSOR, "a0 a1 - -", {"a8": "A", "x0": "X", "x1": "X"}, "a0 a1 x0 x1"),
        # Where only a far one is there, it is taken.
        (TENSOR, "a0 a1 b0 -", {"x0": "X"}, "a0 a1 b0 x0"),
        (TENSOR, "a0 a1 - -", {"a8": "A", "x0": "X"}, "a0 a1 a8 x0"),
        # Without tensor peers the replica's own nodes come first.
        (ParallelDims(shard=3), "a0 - b0", {"x0": "X", "b1": "B"}, "a0 b1 b0"),
    ],
)
def test_those_that_talk_most_are_on_one_node(
    dims: ParallelDims, kept: str, idle: dict[str, str], whole: str | None
) -> None:
    whole = whole or "a0 a1 b0 b1 a2 a3 b8 b9"
    assert repair(dims, [kept], idle) == [whole]


@pytest.mark.parametrize("dims", [TENSOR, CONTEXT, LEVELS, FLAT])
@pytest.mark.parametrize("nodes", [*permutations("ab"), *permutations("ac")])
@pytest.mark.parametrize("idle", permutations(["a9", "b9"]))
def test_of_two_remnants_each_gets_the_worker_on_its_own_node(
    dims: ParallelDims, nodes: Sequence[str], idle: Sequence[str]
) -> None:
    """The one on node C has none there, and leaves the other's to it."""
    kept = [" ".join(f"{node}{rank}" for rank in range(dims.workers - 1)) for node in nodes]
    found = repair(dims, [f"{names} -" for names in kept], {w: w[0].upper() for w in idle})
    assert found == [f"{names} {'a9' if names[0] == 'a' else 'b9'}" for names in kept]


@pytest.mark.parametrize("kept", permutations(["a0 a1 c2 -", "b0 b1 a2 -"]))
@pytest.mark.parametrize("idle", permutations(["a9", "b9"]))
def test_a_tensor_peer_has_its_neighbour_before_the_rest_of_another_replica(
    kept: Sequence[str], idle: Sequence[str]
) -> None:
    found = repair(TENSOR, kept, {name: name[0].upper() for name in idle})
    whole = {"a0 a1 c2 -": "a0 a1 c2 b9", "b0 b1 a2 -": "b0 b1 a2 a9"}
    assert found == [whole[names] for names in kept]


@pytest.mark.parametrize("kept", permutations(["- - a2 a3", "c0 - d2 -"]))
def test_whose_peer_is_far_takes_none_of_those_that_another_group_needs_together(
    kept: Sequence[str],
) -> None:
    found = repair(TENSOR, kept, {name: name[0].upper() for name in ("c7", "c8", "c9", "b9")})
    whole = {"- - a2 a3": "c8 c9 a2 a3", "c0 - d2 -": "c0 c7 d2 b9"}
    assert found == [whole[names] for names in kept]


@given(
    st.lists(st.lists(st.sampled_from("ABC-"), min_size=4, max_size=4), min_size=2, max_size=3),
    st.lists(st.sampled_from("ABC"), max_size=6),
    st.sampled_from([TENSOR, CONTEXT, FLAT]),
)
@example([[*"AAB-"], [*"AAA-"]], [*"AC"], TENSOR)
def test_any_remnants(kept: list[list[str]], idle: list[str], dims: ParallelDims) -> None:
    remnants = [
        Remnant(
            index=index,
            formed=1 + index,
            workers={rank: f"{node}{index}{rank}" for rank, node in enumerate(row) if node != "-"},
        )
        for index, row in enumerate(kept)
    ]
    pool = [f"{node}s{number}" for number, node in enumerate(idle)]
    names = [worker for remnant in remnants for worker in remnant.workers.values()] + pool
    members = on_nodes({name: name[0] for name in names})
    whole = plan_repairs(remnants, pool, members, dims, 9)
    # The largest, as many as there are workers for.
    lacking = sorted(row.count("-") for row in kept)
    assert [kept[replica.index].count("-") for replica in whole] == lacking[: len(whole)]
    assert sum(lacking[: len(whole)]) <= len(idle)
    assert len(whole) == len(kept) or sum(lacking[: len(whole) + 1]) > len(idle)
    # Survivors keep their ranks, and each of the others has one place at most.
    for replica in whole:
        assert remnants[replica.index].workers.items() <= dict(enumerate(replica.workers)).items()
    placed = [worker for replica in whole for worker in replica.workers]
    assert len({*placed}) == len(placed) == 4 * len(whole) and {*placed} <= {*names}
    if dims is not TENSOR:
        return
    # Who is far from its tensor peer is not where another's lives that got a far one, and nobody
    # near is left.
    far = {
        (kept[replica.index][rank ^ 1], worker[0])
        for replica in whole
        for rank, worker in enumerate(replica.workers)
        if kept[replica.index][rank] == "-" and kept[replica.index][rank ^ 1] != worker[0]
    }
    left = {worker[0] for worker in pool if worker not in placed}
    assert not {peer for peer, _ in far} & ({node for _, node in far} | left)


def test_what_idle_workers_are_not_enough_for_waits() -> None:
    members = on_nodes({"a0": "A", "b0": "B", "c0": "C", "s": "C"})
    remnants = [
        Remnant(index=0, formed=1, workers={0: "a0"}),
        Remnant(index=1, formed=2, workers={0: "b0", 2: "c0"}),
    ]
    (replica,) = plan_repairs(remnants, ["s"], members, ParallelDims(shard=3), 5)
    assert replica.workers == ("b0", "s", "c0")


def merge(dims: ParallelDims, kept: Sequence[str], idle: int) -> tuple[list[str], list[str]]:
    """Those that are left, in order of index, and those who are idle. Arguments as `repair`."""
    names = [name for row in kept for name in row.split()]
    members = on_nodes({name: name[0].upper() for name in names})
    left, freed = merge_remnants(list_remnants(kept), idle, members, dims)
    ranks = range(dims.workers)
    left = sorted(left, key=lambda remnant: remnant.index)
    return [" ".join(each.workers.get(r, "-") for r in ranks) for each in left], freed


@pytest.mark.parametrize(
    ("dims", "kept", "idle", "left", "freed"),
    [
        # The tensor peers' nodes, not the oldest.
        (TENSOR, "a0 - b0 -, c0 - d0 -, - c1 - d1", 0, "a0 - b0 -, c0 c1 d0 d1", ""),
        (TENSOR, "c0 - d0 -, a0 - b0 -, - c1 - d1", 0, "c0 c1 d0 d1, a0 - b0 -", ""),
        # Near none, or all: the oldest; and so without tensor peers.
        (TENSOR, "a0 - b0 -, c0 - d0 -, - x1 - x3", 0, "a0 x1 b0 x3, c0 - d0 -", ""),
        (TENSOR, "x0 - x2 -, x4 - x6 -, - x1 - x3", 0, "x0 x1 x2 x3, x4 - x6 -", ""),
        (FLAT, "a0 - b0 -, c0 - d0 -, - c1 - d1", 0, "a0 c1 b0 d1, c0 - d0 -", ""),
        # Where each would have one near worker, and none would be whole, another would be given up.
        (TENSOR, "a0 - b0 -, c0 - d0 -, - a1 - d1", 0, "a0 a1 b0 d1, c0 - d0 -", ""),
        # Or an idle worker would have to heal.
        (TENSOR, "a0 - b0 -, c0 - d0 -, - a1 - d1", 1, "a0 a1 b0 d1, c0 - d0 -", ""),
        # Who is of no use to others is idle.
        (TENSOR, "a0 a1 - -, b0 b1 - -", 1, "a0 a1 - -", "b0 b1"),
    ],
)
def test_workers_of_one_given_up_go_where_their_tensor_peers_are(
    dims: ParallelDims, kept: str, idle: int, left: str, freed: str
) -> None:
    assert merge(dims, kept.split(", "), idle) == (left.split(", "), freed.split())


@given(
    st.lists(st.lists(st.sampled_from("AB--"), min_size=4, max_size=4), min_size=2, max_size=5),
    st.integers(0, 3),
)
@example([[*"A-B-"], [*"B-A-"], [*"-A-A"]], 0)
def test_no_more_are_given_up_for_tensor_peers(kept: list[list[str]], idle: int) -> None:
    rows = [
        " ".join(node if node == "-" else f"{node}{i}{rank}" for rank, node in enumerate(row))
        for i, row in enumerate(kept)
    ]
    left, freed = merge(TENSOR, rows, idle)
    by_size, idle_then = merge(FLAT, rows, idle)  # that has no tensor peers
    assert len(left) >= len(by_size)
    assert survivors(left, idle + len(freed)) >= survivors(by_size, idle + len(idle_then))
    # Nobody is lost, and each keeps its rank.
    ranks = {worker: rank for row in rows for rank, worker in by_rank(row).items()}
    placed = [(worker, rank) for row in left for rank, worker in by_rank(row).items()]
    assert sorted([*placed, *((w, ranks[w]) for w in freed)]) == sorted(ranks.items())


def survivors(left: Sequence[str], idle: int) -> int:
    """Workers with state in the replicas that can be made whole."""
    return sum(len(each.workers) for each in find_mendable(list_remnants(left), idle, 4))
