"""What a single worker casts for a block's forward stays until its backward, if asked for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.support.data_plane import make_engine
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import ParallelConfig, TrainConfig
from trainer.tasks.custom import CustomTask

BLOCKS = 3


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).float().square().sum(), len(batch)


def test_they_are_cast_once_a_micro_batch_with_the_same_bits(port: int) -> None:
    task = CustomTask(build_model=Blocks, loss_function=loss_of, dataset=[0])
    train = TrainConfig(task=task, steps=1, global_batch=1, seed=0, precision="bfloat16")
    gradients = []
    for formation, (reshard, casts) in enumerate([(None, 2), (True, 2), (False, 1)]):
        engine = make_engine(
            0,
            Rendezvous(host="127.0.0.1", port=port, timeout_s=60),
            task,
            replace(train, parallel=ParallelConfig(reshard_after_forward=reshard)),
            formation=formation,
        )
        flat = torch.empty(engine.layout.count)
        engine.collect_in(flat)
        # The first micro-batch also copies gradients.
        engine.backward(engine.task.loss(engine.model, torch.ones(2, 8))[0])
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            engine.backward(engine.task.loss(engine.model, torch.ones(2, 8))[0])
        names = [event.name for event in profiler.events()]
        assert names.count("aten::_foreach_copy_") == BLOCKS * casts
        engine.backward_at_last(engine.task.loss(engine.model, torch.ones(2, 8))[0], lambda _: None)
        gradients.append(flat)
        leave_replica_group()
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
