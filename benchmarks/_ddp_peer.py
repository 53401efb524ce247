"""The toy run with plain DDP on Gloo and a checkpoint every ten steps, restarted as a whole.

    torchrun ... -m benchmarks._ddp_peer TRACES CHECKPOINTS STEPS STEP_S

The same loop under Ray Train's TorchTrainer: `train_on_ray`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks._toy import BATCH, PacedLoss, Trace, build_model, dataset

SAVE_EVERY = 10


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    start: int,
    steps: int,
    step_s: float,
    traces: str,
    save: Callable[[int], None],
) -> None:
    """Steps `start` to `steps`, with `save` every ten."""
    rank, world = dist.get_rank(), dist.get_world_size()
    points, classes = dataset().tensors
    loss_function, trace = PacedLoss(step_s), Trace(traces, rank)
    for step in range(start, steps):
        first = (step * world + rank) * BATCH % (len(points) - BATCH)
        chosen = slice(first, first + BATCH)
        loss, terms = loss_function(model, (points[chosen], classes[chosen]))
        optimizer.zero_grad()
        (loss / terms).backward()
        optimizer.step()
        trace.add(step, world)
        if (step + 1) % SAVE_EVERY == 0:
            save(step + 1)


def state_of(model: Any, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def restore(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Loads a checkpoint file. Returns its step, 0 where there is none."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train_on_ray(config: dict[str, Any]) -> None:
    """The train function of a stock TorchTrainer."""
    import ray.train.torch

    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = ray.train.get_checkpoint()
    start = 0 if found is None else restore(Path(found.path) / "state.pt", model, optimizer)

    def save(step: int) -> None:
        if dist.get_rank() > 0:
            ray.train.report({"step": step})
            return
        with tempfile.TemporaryDirectory() as directory:
            torch.save(state_of(model, optimizer, step), Path(directory) / "state.pt")
            kept = ray.train.Checkpoint.from_directory(directory)
            ray.train.report({"step": step}, checkpoint=kept)

    train(model, optimizer, start=start, save=save, **config)


def main(traces: str, checkpoints: str, steps: int, step_s: float) -> None:
    """One worker under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = Path(checkpoints) / "state.pt"
    start = restore(path, model, optimizer)

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            torch.save(state_of(model, optimizer, step), path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)

    train(model, optimizer, start=start, steps=steps, step_s=step_s, traces=traces, save=save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
