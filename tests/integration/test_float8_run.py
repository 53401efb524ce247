"""A run with 8-bit products goes on from a checkpoint of a run without them, and the other way
round. Kills: test_matrix_kills.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointing import CheckpointConfig
from elastic import TrainConfig
from tests.support.tiny import fit, tiny_task, tiny_train, tiny_trainer
from tests.support.watching import events_of
from trainer.float8.config import Float8

pytestmark = pytest.mark.soak

WIDE = {"hidden_size": 64, "intermediate_size": 128}


def train(text: Path, **changes: Any) -> TrainConfig:
    """A run whose weights are gathered in 8 bits by two shards."""
    settings = {"converters": (Float8(gather=True),), "precision": "bfloat16", **changes}
    return tiny_train(text, shard=2, task=tiny_task(text, **WIDE), **settings)


def test_a_checkpoint_crosses_over(cluster: None, text: Path, tmp_path: Path) -> None:
    """From a plain run to one in 8 bits, and back: each goes on where the other ended."""
    saves = CheckpointConfig(every_steps=4)

    def go_on(steps: int, **changes: Any) -> list[float]:
        settings = train(text, steps=steps, **changes)
        return fit(tiny_trainer(text, tmp_path, train=settings, checkpoint=saves)).losses

    plain: dict[str, Any] = {"converters": ()}
    go_on(4, **plain)
    go_on(8)
    losses = go_on(12, **plain)
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    started = events_of(tmp_path / "run", "run_started")
    assert [event["start_step"] for event in started] == [0, 4, 8]
