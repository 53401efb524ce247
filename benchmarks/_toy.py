"""The toy run that every system trains: model, data, pace, and the record of committed steps.

A step is paced by time, not by computing: the loss function waits for the remainder of `step_s`
since it last returned. So machines that are slow or shared change nothing as long as the rest of a
step fits into it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

FEATURES, CLASSES, BATCH = 64, 10, 8
"""BATCH: samples of one worker in a step."""


def build_model() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.Tanh(), nn.Linear(256, CLASSES))


def dataset(samples: int = 4096) -> TensorDataset:
    """Random points and classes."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(points, torch.randint(CLASSES, (samples,), generator=generator))


class PacedLoss:
    """(model, batch) -> (summed loss, terms), once in `step_s`. The pace is the process's own."""

    _returned_s = 0.0

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        points, classes = batch
        loss = cross_entropy(model(points), classes, reduction="sum")
        time.sleep(max(0.0, PacedLoss._returned_s + self.step_s - time.monotonic()))
        PacedLoss._returned_s = time.monotonic()
        return loss, classes.numel()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that a worker saw committed."""

    time: float
    """When, in seconds since the epoch."""
    step: int
    """Its index."""
    rank: int
    """The worker's rank."""
    pid: int
    """Its process."""
    members: int
    """Workers that took part in it."""


class Trace:
    """Appends this process's committed steps to a file of its own in `directory`."""

    def __init__(self, directory: str, rank: int) -> None:
        self._rank = rank
        path = Path(directory) / f"{rank}.{os.getpid()}.jsonl"
        self._file = path.open("a", buffering=1)

    def add(self, step: int, members: int) -> None:
        """A step is committed."""
        seen = Step(time=time.time(), step=step, rank=self._rank, pid=os.getpid(), members=members)
        self._file.write(json.dumps(vars(seen)) + "\n")


def read_traces(directory: Path) -> list[Step]:
    """Everything that the processes wrote so far, in order of time."""
    lines = [
        line
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text().splitlines(keepends=True)
    ]
    steps = [Step(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(steps, key=lambda step: step.time)
