"""What of a layout is told, or refused, on nodes that hold so many workers."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config import ParallelConfig
from trainer.dryrun.on_nodes import describe_levels, find_misfits

FILLS = "a shard degree with which replicas fill their nodes"


def found(room: int, **layout: Any) -> list[tuple[str, bool]]:
    misfits = find_misfits(ParallelConfig(**layout), room)
    assert all(f" = {misfit.value}: " in str(misfit) for misfit in misfits)
    return [(misfit.field.removeprefix("train.parallel."), misfit.refused) for misfit in misfits]


@pytest.mark.parametrize(("tensor", "room"), [(1, 0), (8, 8)])
def test_a_tensor_group_on_a_node(tensor: int, room: int) -> None:
    assert not found(room, tensor=tensor)


@pytest.mark.parametrize(("tensor", "room"), [(8, 4), (2, 1), (2, 0)])
def test_a_tensor_group_that_no_node_holds_is_refused(tensor: int, room: int) -> None:
    assert found(room, tensor=tensor, context=2) == [("tensor", True)]


@pytest.mark.parametrize(
    ("context", "tensor", "room", "told"),
    [(8, 1, 8, False), (4, 2, 8, False), (16, 1, 8, True), (8, 2, 8, True), (2, 1, 0, True)],
)
def test_the_workers_of_a_sample_that_no_node_holds_are_told(
    context: int, tensor: int, room: int, told: bool
) -> None:
    expected = [("context", False)] if told else []
    assert found(room, shard=4, context=context, tensor=tensor) == expected


@pytest.mark.parametrize(
    ("layout", "room", "refused", "use"),
    [
        ({"shard": 16, "workers_per_node": 8}, 8, None, ""),
        ({"shard": 16, "workers_per_node": 8}, 12, None, ""),
        ({"shard": 4, "tensor": 2, "workers_per_node": 4}, 4, None, ""),
        ({"shard": 16, "workers_per_node": 8}, 4, True, "Use 4, or None, or larger nodes"),
        ({"shard": 16, "workers_per_node": 8}, 1, True, "Use None, or larger nodes"),
        ({"shard": 8, "tensor": 4, "workers_per_node": 8}, 4, True, "Use None, or larger nodes"),
        ({"shard": 34, "workers_per_node": 17}, 8, True, "Use None, or larger nodes"),
        ({"shard": 16, "workers_per_node": 2}, 8, False, "Use 8, or None"),
        ({"shard": 40, "workers_per_node": 5}, 8, False, "Use 8, or None"),
        ({"shard": 12, "workers_per_node": 6}, 8, None, ""),
        ({"shard": 12, "workers_per_node": 4}, 8, False, f"Use None, or {FILLS}"),
        ({"shard": 38, "workers_per_node": 2}, 8, False, f"Use None, or {FILLS}"),
        ({"shard": 8, "workers_per_node": 4}, 8, False, "Use None"),
    ],
)
def test_levels_are_those_of_the_nodes(
    layout: dict[str, Any], room: int, refused: bool | None, use: str
) -> None:
    misfits = find_misfits(ParallelConfig(**layout), room)
    assert [misfit.refused for misfit in misfits] == ([] if refused is None else [refused])
    assert all(misfit.fix == use for misfit in misfits)


def test_two_levels_are_spoken_of_where_they_may_pay() -> None:
    told = describe_levels(ParallelConfig(shard=64, tensor=2), 8)
    assert told is not None
    assert "on 16 nodes, in a ring of 63 steps: workers_per_node=8 makes 15 + 3 of" in told
    for layout in (
        ParallelConfig(shard=16),  # two nodes
        ParallelConfig(shard=16, tensor=8),  # one of its ring on each
        ParallelConfig(shard=64, tensor=2, workers_per_node=8),
        ParallelConfig(shard=128, reshard_after_forward=8),
        ParallelConfig(shard=38),  # five nodes
        ParallelConfig(shard=85),  # eleven, which no level fills
    ):
        assert describe_levels(layout, 8) is None
