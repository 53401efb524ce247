"""A model of which most is frozen, in a module that workers can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic import CustomTask, OptimizerConfig, ParallelConfig, TrainConfig

FROZEN = ("0.weight", "0.bias")
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


def frozen_train(steps: int, *, shard: int = 1, **changes: Any) -> TrainConfig:
    """A short run of it."""
    numbers = torch.Generator().manual_seed(1)
    task = CustomTask(
        build_model=model,
        loss_function=loss,
        dataset=list(torch.randn(64, 8, generator=numbers)),
    )
    return TrainConfig(
        task=task,
        steps=steps,
        global_batch=8,
        lanes=2,
        parallel=ParallelConfig(shard=shard),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=1),
        seed=3,
        **changes,
    )


def initial() -> dict[str, torch.Tensor]:
    """Its parameters before the first step."""
    torch.manual_seed(3)
    return {name: param.detach() for name, param in model().named_parameters()}
