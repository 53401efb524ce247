"""A replica evaluates for longer than a collective may take, while a worker follows."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.data_plane import SavingLink, make_engine
from tests.support.member import loss_of, small_task, small_train
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.loop.between_steps import BetweenSteps
from trainer.loop.link import LoopConfig, Progress
from trainer.replication.replicas import CrossGroup

STEPS, TIMEOUT_S, BATCHES = 8, 4.0, 3
BATCH_S = 0.5 * TIMEOUT_S


def slow_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    time.sleep(BATCH_S)
    return loss_of(model, batch)


def test_whoever_does_not_evaluate_is_there_with_each_batch() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    task = replace(
        small_task(), eval_dataset=small_task().dataset[: 4 * BATCHES], loss_function=slow_loss
    )
    train = replace(small_train(STEPS), eval_every=2)
    engine, link = make_engine(0, alone, task, train), SavingLink()

    def part(rank: int) -> BetweenSteps:
        """Of the worker that evaluates, and of one that follows, which has no replica."""
        cross = CrossGroup(
            replace(alone, timeout_s=TIMEOUT_S),
            "two",
            lanes=[(0, 1), ()],
            total_lanes=2,
            rank=rank,
            device="cpu",
            leave_now=lambda: False,
        )
        follower: Any = SimpleNamespace(task=task, train_config=train, device=torch.device("cpu"))
        return BetweenSteps(
            engine if rank == 0 else follower,
            cross,
            progress=Progress(step=2),
            config=LoopConfig(
                lanes=2, save_every=None, compare_every=None, max_nonfinite_steps=1, until=STEPS
            ),
            link=link,
            samples=8,
            enter=lambda step, phase: None,
            all_evaluate=False,
        )

    with ThreadPoolExecutor(2) as threads:
        evaluates, follows = threads.map(part, range(2))
        assert len(evaluates.batches()) == BATCHES
        sits = threads.submit(follows.sit_out)
        evaluates.save_and_evaluate()
        sits.result(TIMEOUT_S)
        assert [step for step, _, _ in link.evaluations] == [2]
        summed = threads.submit(follows.cross.sum, torch.ones(1))
        assert evaluates.cross.sum(torch.ones(1)).item() == summed.result().item() == 2
    for each in (evaluates, follows):
        each.cross.close()
    leave_replica_group()
