"""Runs whose activations wait on the host, through kills: the bits of an undisturbed run that keeps
them on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic import OffloadConfig, TrainConfig
from tests.support.tiny import fit, tiny_task, tiny_train, tiny_trainer

pytestmark = pytest.mark.slow


def train(text: Path, **changes: Any) -> TrainConfig:
    """Four blocks, every second one recomputed, two shards."""
    task = tiny_task(text, num_hidden_layers=4)
    return tiny_train(text, shard=2, task=task, recompute=2, **changes)


def test_kills_do_not_change_a_bit(cluster: None, text: Path, tmp_path: Path) -> None:
    """Workers of a replica of two, in backward and in the reduction: the others follow."""
    whole = fit(tiny_trainer(text, tmp_path, name="whole", train=train(text)))
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            name="broken",
            train=train(text, offload=OffloadConfig(horizon=1, least_bytes=1)),
            min_replicas=2,
            spares=1,
            faults="kill@4:1,kill@8.reduce:2",
        )
    )
    assert broken.report["faults_fired"] == 2
    assert broken.report["lost_steps"] == 0
    assert broken.report["replicas_equal"] is True
    assert (broken.params, broken.samples) == (whole.params, whole.samples)
    assert broken.losses == whole.losses
