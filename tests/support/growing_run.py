"""A run on a given cluster, slow until a file appears, as a program of its own: a test changes the
cluster meanwhile.

    python tests/support/growing_run.py ADDRESS STORAGE GATE REPLICAS MIN_REPLICAS SHARD SPARES

When it ends, STORAGE/left.json lists the processes, actors, placement groups and shared memory that
it left behind.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from ray.train import RunConfig
from torch import nn

from benchmarks._chaos_left import find_left_behind
from checkpointing import CheckpointConfig
from elastic import (
    CustomTask,
    ElasticTrainer,
    Fault,
    HealthConfig,
    OptimizerConfig,
    ParallelConfig,
    ScalingConfig,
    TrainConfig,
)
from tests.support.gated_run import BATCH, LANES, SAMPLES, build_model, loss

STEPS, PACE_S = 400, 0.05


class PacedData:
    """Points on a parabola. A sample takes its time while the gate is closed."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not Path(self.gate).exists():
            time.sleep(PACE_S)
        x = torch.tensor([index / SAMPLES])
        return x, x * x


def growing_trainer(
    storage: str,
    gate: str,
    scaling: ScalingConfig,
    shard: int,
    *,
    name: str = "run",
    checkpoint: CheckpointConfig | None = None,
    health: HealthConfig | None = None,
    faults: tuple[Fault, ...] = (),
    model: Callable[[], nn.Module] = build_model,
) -> ElasticTrainer:
    """The run."""
    return ElasticTrainer(
        TrainConfig(
            task=CustomTask(build_model=model, loss_function=loss, dataset=PacedData(gate)),
            steps=STEPS,
            global_batch=BATCH,
            lanes=LANES,
            parallel=ParallelConfig(shard=shard),
            optimizer=OptimizerConfig(lr=1e-2),
        ),
        scaling=scaling,
        run_config=RunConfig(name=name, storage_path=storage),
        checkpoint=checkpoint or CheckpointConfig(every_steps=None),
        health=health,
        faults=faults,
    )


def write_left_behind(storage: str, name: str = "run") -> None:
    """Writes down what the run that is over has left behind."""
    left = find_left_behind(Path(storage) / name)
    (Path(storage) / "left.json").write_text(json.dumps(left), encoding="utf-8")


if __name__ == "__main__":
    address, storage, gate, *numbers = sys.argv[1:]
    replicas, min_replicas, shard, spares = map(int, numbers)
    ray.init(address=address, log_to_driver=False)
    sizes = ScalingConfig(max_replicas=replicas, min_replicas=min_replicas, spares=spares)
    growing_trainer(storage, gate, sizes, shard).fit()
    write_left_behind(storage)
