"""What a layout is called, which are refused, and what is said of a loss."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.config import ScalingConfig
from trainer.config import ParallelConfig
from trainer.errors import ConfigError
from trainer.parallel.strategy import after_a_loss, beyond_the_lanes


@pytest.mark.parametrize(
    ("parallel", "replicas", "strategy", "regathered"),
    [
        ({}, 4, "NO_SHARD", 1),
        ({"tensor": 4}, 2, "NO_SHARD", 1),
        ({"reshard_after_forward": False}, 2, "NO_SHARD", 1),
        ({"shard": 8}, 1, "FULL_SHARD", 8),
        ({"shard": 8, "strategy": "FULL_SHARD"}, 1, "FULL_SHARD", 8),
        ({"shard": 6, "tensor": 2}, 3, "HYBRID_SHARD", 6),
        ({"context": 2}, 3, "HYBRID_SHARD", 2),
        ({"shard": 2, "context": 2, "reshard_after_forward": 2}, 3, "HYBRID_SHARD", 2),
        ({"shard": 8, "reshard_after_forward": False}, 1, "SHARD_GRAD_OP", 1),
        ({"shard": 8, "strategy": "SHARD_GRAD_OP"}, 2, "SHARD_GRAD_OP", 1),
    ],
)
def test_what_a_layout_is_called(
    parallel: dict[str, Any], replicas: int, strategy: str, regathered: int
) -> None:
    layout = ParallelConfig(**parallel).layout(replicas)
    assert (layout.strategy, layout.dims.regathered) == (strategy, regathered)
    assert str(layout).startswith(f"{strategy}, {replicas} replicas of shard ")


@pytest.mark.parametrize(
    ("parallel", "replicas", "field"),
    [
        ({"strategy": "NO_SHARD", "shard": 2}, 1, "strategy"),
        ({"strategy": "FULL_SHARD", "shard": 2}, 2, "strategy"),
        ({"strategy": "HYBRID_SHARD", "shard": 2}, 1, "strategy"),
        ({"strategy": "HYBRID_SHARD"}, 2, "strategy"),
        ({"strategy": "SHARD_GRAD_OP"}, 2, "strategy"),
        ({"strategy": "SHARD_GRAD_OP", "shard": 2, "reshard_after_forward": True}, 2, "strategy"),
        ({"strategy": "FULL_SHARD", "shard": 2, "reshard_after_forward": False}, 1, "strategy"),
        ({"shard": 4, "tensor": 2, "reshard_after_forward": 2}, 1, "reshard_after_forward"),
        ({"shard": 4, "reshard_after_forward": 3}, 1, "reshard_after_forward"),
        ({"shard": 4, "reshard_after_forward": 4}, 1, "reshard_after_forward"),
        ({"shard": 4, "reshard_after_forward": 1}, 1, "reshard_after_forward"),
    ],
)
def test_what_cannot_be_is_refused_by_the_driver(
    parallel: dict[str, Any], replicas: int, field: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        ScalingConfig(max_replicas=replicas).check(ParallelConfig(**parallel))
    assert refusal.value.field == f"train.parallel.{field}"


def test_one_replica_has_nobody_to_be_made_up_from() -> None:
    assert "snapshot" in after_a_loss(1)
    assert "in place, while" in after_a_loss(2)


def test_replicas_without_lanes_are_spoken_of() -> None:
    assert beyond_the_lanes(2, 2) is beyond_the_lanes(1, 2) is None
    assert "6 of 8 hold the state and compute nothing" in str(beyond_the_lanes(8, 2))
