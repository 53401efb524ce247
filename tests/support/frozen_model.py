"""A model of which most is frozen, in a module that workers can import."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from elastic import CustomTask, OptimizerConfig, ParallelConfig, TrainConfig
from trainer.data import sample_ids

FROZEN = ("0.weight", "0.bias")
SEED, BATCH, SAMPLES = 3, 8, 64
TRAINED = ("2.weight", "2.bias")


def model() -> nn.Module:
    """144 kB that are frozen, 64 kB that are trained, in one FSDP group."""
    layers = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 4))
    for param in layers[0].parameters():
        param.requires_grad_(False)
    return layers


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Its outputs should be one."""
    out = model(batch)
    return (out - 1).square().sum(), out.numel()


class Numbers:
    """Samples, of which those of step `late` wait for the file `gate`."""

    def __init__(self, gate: str | None, late: int) -> None:
        self.values = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
        self.gate = gate
        self.late = frozenset(sample_ids(SEED, late * BATCH, BATCH, SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        while self.gate is not None and index in self.late and not Path(self.gate).exists():
            time.sleep(0.01)
        return self.values[index]


def frozen_train(
    steps: int, *, shard: int = 1, gate: Path | None = None, late: int = 0
) -> TrainConfig:
    """A short run of it, which does not go on with step `late` before the file `gate` is there."""
    return TrainConfig(
        task=CustomTask(
            build_model=model,
            loss_function=loss,
            dataset=Numbers(None if gate is None else str(gate), late),
        ),
        steps=steps,
        global_batch=BATCH,
        lanes=2,
        parallel=ParallelConfig(shard=shard),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=1),
        seed=SEED,
    )


def initial() -> dict[str, torch.Tensor]:
    """Its parameters before the first step."""
    torch.manual_seed(SEED)
    return {name: param.detach() for name, param in model().named_parameters()}
