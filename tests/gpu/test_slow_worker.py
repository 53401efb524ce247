"""Two workers of a replica wait for each other before each block, so their steps take equally long.
Each one's own time tells which of them is slow."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from torch import nn

from tests.support.data_plane import make_engine
from tests.support.fabric import GLOO, NCCL, Fabric, on
from tests.support.processes import PATIENCE, play
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import ParallelConfig, TrainConfig
from trainer.loop.clock import StepClock
from trainer.tasks.custom import CustomTask

BLOCKS, STEPS = 4, 8
HELD_UP_S = 0.01
"""Of each block's forward, on the slow worker; a fabric's device is held up for longer."""

_slow: Fabric | None = None
"""What this process is slow on."""


class Block(nn.Module):
    """A layer, which takes its time where its process is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Alike on all workers."""
        if _slow is not None and _slow.device == "cuda":
            _slow.hold_up()
        elif _slow is not None:
            until_s = time.thread_time() + HELD_UP_S
            while time.thread_time() < until_s:
                pass
        out: torch.Tensor = self.inner(numbers)
        return out.tanh()


class Model(nn.Module):
    """Some blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for block in self.blocks:
            numbers = block(numbers)
        return numbers


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Anything."""
    return model(batch).square().sum(), batch.numel()


def compute(rank: int, port: int, fabric: Fabric) -> None:
    """One of the two."""
    global _slow
    fabric.enter(rank, 2)
    _slow = fabric if rank == 1 else None
    samples = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    task = CustomTask(build_model=Model, loss_function=loss_of, dataset=samples)
    train = TrainConfig(task=task, steps=STEPS, global_batch=8, parallel=ParallelConfig(shard=2))
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=PATIENCE.total_seconds())
    engine = make_engine(rank, meet, task, train, device=fabric.device)
    clock = StepClock(engine.device, engine.block_times)
    found = []
    for step in range(STEPS):
        clock.begin()
        clock.enter("forward")
        loss, _ = engine.task.loss(engine.model, engine.take(samples[:4]))
        engine.backward(loss)
        clock.took(256, 0.0)
        clock.enter("in_commit")
        float(loss)  # the host waits once
        clock.committed(step)
        if (own := clock.take_own()) is not None:
            found.append((own.compute_s, own.step_s))
    clock.close()
    store = dist.TCPStore("127.0.0.1", port)
    store.set(f"own {rank}", json.dumps(found))
    store.wait(["own 0", "own 1"], PATIENCE)
    leave_replica_group()


@on(GLOO, NCCL)
def test_own_time_tells_who_of_a_replica_is_slow(fabric: Fabric) -> None:
    store = play(compute, fabric, processes=2)
    (fast, steps), (slow, same) = (
        (sorted(column) for column in zip(*json.loads(store.get(f"own {rank}")), strict=True))
        for rank in range(2)
    )
    assert slow[0] > BLOCKS * HELD_UP_S / 2 and slow[0] > 3 * fast[0], (fast, slow)
    middle = len(steps) // 2
    assert 0.5 < steps[middle] / same[middle] < 2, "each waits for the other"
