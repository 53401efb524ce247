"""A run that stops halfway until a file appears, as a program of its own, so that a test can
interrupt it.

    python tests/support/gated_run.py ADDRESS STORAGE GATE REPLICAS [MEMORY_EVERY]

With ADDRESS "local" it has a cluster of its own, which ends with it. With MEMORY_EVERY it takes
snapshots in memory, and no checkpoint before its end.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from ray.train import RunConfig
from torch import nn

from checkpointing import (
    CheckpointConfig,
    Keys,
    Reader,
    S3Config,
    load_manifest,
    open_store,
    params_sha256,
)
from elastic import (
    CustomTask,
    ElasticTrainer,
    OptimizerConfig,
    ParallelConfig,
    ScalingConfig,
    TrainConfig,
    parse_faults,
)

STEPS, HALF, BATCH, LANES, SAMPLES = 12, 6, 8, 2, 64


def saved_weights(where: Path | S3Config, step: int = STEPS) -> str:
    """The digest of the parameters in a checkpoint, which must be there."""
    store = open_store(where)
    manifest = load_manifest(store, Keys(), step)
    return params_sha256(Reader(store, manifest), [n for n in manifest.tensors if "param/" in n])


class GatedData:
    """Points on a parabola. Samples of the second half of the run wait for the gate."""

    def __init__(self, gate: str, late: frozenset[int]) -> None:
        self.gate, self.late = gate, late

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        while index in self.late and not Path(self.gate).exists():
            time.sleep(0.01)
        x = torch.tensor([index / SAMPLES])
        return x, x * x


def build_model() -> nn.Module:
    """A small network with dropout, whose random numbers must not depend on the worker."""
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Summed squared error."""
    x, y = batch
    return (model(x) - y).square().sum(), y.numel()


@dataclass(frozen=True)
class Steady:
    """A schedule of a user's own module."""

    value: float

    def rate(self, step: int, steps: int) -> float:
        return self.value


def late_samples() -> frozenset[int]:
    """Ids that the second half of the run needs first: those of step HALF + 1."""
    from trainer.data import sample_ids

    return frozenset(sample_ids(0, (HALF + 1) * BATCH, BATCH, SAMPLES).tolist())


def gated_trainer(
    storage: str,
    gate: str,
    replicas: int,
    *,
    checkpoint: CheckpointConfig | None = None,
    shard: int = 1,
    spares: int = 0,
    faults: str = "none",
) -> ElasticTrainer:
    """The run."""
    return ElasticTrainer(
        TrainConfig(
            task=CustomTask(
                build_model=build_model,
                loss_function=loss,
                dataset=GatedData(gate, late_samples()),
            ),
            steps=STEPS,
            global_batch=BATCH,
            lanes=LANES,
            parallel=ParallelConfig(shard=shard),
            optimizer=OptimizerConfig(lr=1e-2),
        ),
        scaling=ScalingConfig(max_replicas=replicas, spares=spares),
        run_config=RunConfig(name="gated", storage_path=storage),
        checkpoint=checkpoint or CheckpointConfig(every_steps=HALF),
        faults=parse_faults(faults),
    )


def in_memory(every: int) -> CheckpointConfig:
    """Snapshots alone."""
    return CheckpointConfig(every_steps=None, memory_every=every)


if __name__ == "__main__":
    address, storage, gate, replicas, *memory_every = sys.argv[1:]
    if address == "local":
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=address, log_to_driver=False)
    checkpoint = in_memory(int(memory_every[0])) if memory_every else None
    gated_trainer(storage, gate, int(replicas), checkpoint=checkpoint).fit()
