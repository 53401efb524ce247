"""A run of three replicas that computes much while one file stands, and is slow until another one
does, as a program of its own: a test slows one of its machines meanwhile, and a node on this
machine takes that one's place.

    python tests/support/slowed_run.py ADDRESS STORAGE GATE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray
import torch
from ray.train import RunConfig
from torch import nn

from checkpointing import CheckpointConfig
from elastic import (
    CustomTask,
    ElasticTrainer,
    HealthConfig,
    LocalNodes,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
)
from tests.support.gated_run import build_model
from tests.support.gated_run import loss as squared_error
from tests.support.growing_run import STEPS, PacedData, write_left_behind

LANES, BATCH = 6, 12
COMPUTE_S = 0.03
"""Of the processor, in each forward while the file stands; two a step."""


class Loss:
    """Squared errors, which take long to compute while the file `busy` stands."""

    def __init__(self, busy: str) -> None:
        self._busy = busy

    def __call__(
        self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        if model.training and Path(self._busy).exists():
            until = time.thread_time() + COMPUTE_S
            while time.thread_time() < until:
                pass
        return squared_error(model, batch)


def slowed_train(busy: str, gate: str) -> TrainConfig:
    """What it learns, and how."""
    return TrainConfig(
        task=CustomTask(build_model=build_model, loss_function=Loss(busy), dataset=PacedData(gate)),
        steps=STEPS,
        global_batch=BATCH,
        lanes=LANES,
        optimizer=OptimizerConfig(lr=1e-2),
    )


if __name__ == "__main__":
    address, storage, gate = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    ElasticTrainer(
        slowed_train(f"{storage}/busy", gate),
        scaling=ScalingConfig(max_replicas=3),
        run_config=RunConfig(name="run", storage_path=storage),
        checkpoint=CheckpointConfig(every_steps=None),
        health=HealthConfig(move_slow=True, replace_nodes=LocalNodes(cpus=1)),
    ).fit()
    write_left_behind(storage)
