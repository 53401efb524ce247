"""An optimizer of one's own: the driver tries it before anything starts, and the coordinator needs
nothing of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from ray.train import RunConfig
from torch import nn

from elastic import ConfigError, ElasticTrainer
from tests.support.lion import InverseRoot, Lion
from tests.support.run_plan import told_to_the_coordinator
from trainer.config import TrainConfig
from trainer.tasks.custom import CustomTask

TASK = CustomTask(
    build_model=lambda: nn.Linear(3, 2),
    loss_function=lambda model, batch: (model(batch).sum(), 1),
    dataset=[0],
)
LION = Lion(schedule=InverseRoot(lr=0.1))


def trainer_with(optimizer: Any, storage: Path) -> ElasticTrainer:
    train = TrainConfig(task=TASK, steps=1, global_batch=1, optimizer=optimizer)
    return ElasticTrainer(train, run_config=RunConfig(name="run", storage_path=str(storage)))


def test_the_coordinator_is_told_nothing_of_it(tmp_path: Path) -> None:
    config = told_to_the_coordinator(trainer_with(LION, tmp_path), tmp_path)
    assert b"lion" in pickle.dumps(LION)
    assert b"lion" not in pickle.dumps(config)


class OfTwo(Lion):
    """Its second moment is nowhere to be found."""

    moments = ("momentum", "variance")


def test_the_driver_refuses_what_cannot_be_before_anything_is_there(tmp_path: Path) -> None:
    trainer = trainer_with(OfTwo(schedule=InverseRoot(lr=0.1)), tmp_path)
    with pytest.raises(ConfigError, match=r"has \['momentum'\], its moments are \['momentum', 'v"):
        trainer.fit()
    assert list(tmp_path.iterdir()) == []
