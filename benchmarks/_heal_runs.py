"""Runs on Ray that lose one worker of a replica, for `benchmarks.heal --shard`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._common import scratch
from benchmarks._toy import PacedLoss

WIDTH, STATE_BYTES_PER_PARAMETER = 1024, 12
STEPS, KILLED_AT, STEP_S = 60, 10, 0.2


class Points:
    """Vectors, each with a class."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((WIDTH,), index / 4096), torch.tensor(index % WIDTH)


@dataclass(frozen=True)
class Layers:
    """Makes a model of square layers."""

    count: int

    def __call__(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(self.count)))

    @property
    def state_bytes(self) -> int:
        """Of the model and AdamW's moments."""
        return self.count * WIDTH * (WIDTH + 1) * STATE_BYTES_PER_PARAMETER


def lose_one(shard: int, state_mib: int) -> dict[str, float]:
    """Two replicas of `shard` workers and a spare: one worker of the second replica is killed.

    Returns:
        rejoin_s: from the news of its death until its replica has lanes again. bytes_ratio: state
        received / state of one worker.
    """
    layers = Layers(max(1, math.ceil(state_mib * 2**20 / STATE_BYTES_PER_PARAMETER / WIDTH**2)))
    with scratch("heal") as directory:
        happened = _run(directory, layers, shard)
    (lost,) = (e["time"] for e in happened if e["kind"] == "worker_lost")
    rosters = [e for e in happened if e["kind"] == "regroup_done" and e["time"] > lost]
    back = [e["time"] for e in rosters if len(e["lanes"]) == 2 and all(e["lanes"].values())]
    healed = [e["bytes"] for e in happened if e["kind"] == "replica_healed"]
    if not back:
        raise RuntimeError(f"the run of {STEPS} steps ended before the replica was back")
    return {
        "rejoin_s": back[0] - lost,
        "bytes_ratio": sum(healed) / (layers.state_bytes / shard),
    }


def _run(directory: Path, layers: Layers, shard: int) -> list[dict[str, Any]]:
    from ray.train import RunConfig

    from elastic import (
        CheckpointConfig,
        CustomTask,
        ElasticTrainer,
        ParallelConfig,
        ScalingConfig,
        TrainConfig,
        parse_faults,
    )
    from elastic.reporting.event_log import read_events

    task = CustomTask(build_model=layers, loss_function=PacedLoss(STEP_S), dataset=Points())
    ElasticTrainer(
        TrainConfig(task=task, steps=STEPS, global_batch=16, parallel=ParallelConfig(shard=shard)),
        scaling=ScalingConfig(max_replicas=2, spares=1),
        run_config=RunConfig(name="run", storage_path=str(directory)),
        checkpoint=CheckpointConfig(every_steps=None),
        faults=parse_faults(f"kill@{KILLED_AT}:{shard}"),
    ).fit()
    return [event.to_json() for event in read_events(directory / "run" / "events.jsonl")]
