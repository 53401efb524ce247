"""Who takes the places that a replica has lost, by the nodes that workers are on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elastic.membership.repairs import plan_repairs
from elastic.protocol.messages import Identity
from elastic.protocol.roster import Remnant
from trainer.parallel.layout import ParallelDims


def on_nodes(nodes: Mapping[str, str]) -> dict[str, Identity]:
    return {
        worker: Identity(worker=worker, rank=rank, node=node, pid=rank)
        for rank, (worker, node) in enumerate(nodes.items())
    }


def repair(dims: ParallelDims, kept: str, idle: Mapping[str, str]) -> tuple[str, ...]:
    """One replica of workers that are named after their nodes, in capitals; "-" is lost.

    Args:
        dims: its.
        kept: by rank.
        idle: worker -> its node.
    """
    workers = {rank: name for rank, name in enumerate(kept.split()) if name != "-"}
    members = on_nodes({name: name[0].upper() for name in workers.values()} | dict(idle))
    remnant = Remnant(index=0, formed=1, workers=workers)
    (replica,) = plan_repairs([remnant], list(idle), members, dims, 2)
    assert (replica.index, replica.formed) == (0, 2)
    return replica.workers


TENSOR = ParallelDims(shard=2, tensor=2)
LEVELS = ParallelDims(shard=4, tensor=2, nodes=2)
CONTEXT = ParallelDims(shard=2, others=(("context", 2),))


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
    assert repair(dims, kept, idle) == tuple(whole.split())


def test_what_idle_workers_are_not_enough_for_waits() -> None:
    members = on_nodes({"a0": "A", "b0": "B", "c0": "C", "s": "C"})
    remnants = [
        Remnant(index=0, formed=1, workers={0: "a0"}),
        Remnant(index=1, formed=2, workers={0: "b0", 2: "c0"}),
    ]
    (replica,) = plan_repairs(remnants, ["s"], members, ParallelDims(shard=3), 5)
    assert replica.workers == ("b0", "s", "c0")
