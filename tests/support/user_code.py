"""User code that goes wrong, in a module that Ray's workers can import."""

from __future__ import annotations

import threading
import time

import torch
from torch import nn

from trainer.errors import GroupError
from trainer.replication.replicas import CrossGroup, Flight


def model() -> nn.Module:
    return nn.Linear(1, 1)


class Deciding(nn.Module):
    """Has a block that looks at its numbers, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Decision()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks[0](x)
        return y


class Decision(nn.Module):
    """The block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(2 * x if x.sum() > 0 else x)
        return y


def failing_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    if (batch == 5).any():
        raise RuntimeError("gloo: sample 5 is not to my taste")
    return model(batch).square().sum(), batch.numel()


def summed_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), batch.numel()


class SpoiltSamples:
    """One of them cannot be read.

    Args:
        error: what comes of it.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise self.error("sample 5 is spoilt")
        return torch.tensor([float(index)])


def endless_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(batch) / 0).sum(), batch.numel()


def putting_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Calls an operator without a deterministic implementation, which only workers can find."""
    if threading.current_thread().name == "try-loss":
        raise RuntimeError("this needs a worker")
    torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
    return model(batch).square().sum(), batch.numel()


def slow_to_evaluate(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    time.sleep(0.2 if model.training else 0.5)
    return model(batch).square().sum(), batch.numel()


def loss_before_a_bad_link(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """From sample 5 on, no collective across replicas comes through on this worker."""
    if (batch == 5).any():
        CrossGroup.poll = _fail  # type: ignore[method-assign]
    return model(batch).square().sum(), batch.numel()


def _fail(self: CrossGroup, flight: Flight) -> None:
    raise self._lose(GroupError("the link is bad"))
