"""A newcomer that is called away when its state has just arrived keeps it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.commit import Commit
from trainer.config import OptimizerConfig, TrainConfig
from trainer.engine import Engine
from trainer.heal import Newcomer, Source, Wire
from trainer.parallel.layout import Slot
from trainer.task import CustomTask

DEADLINE_S = 30.0


@pytest.fixture
def pair() -> Iterator[tuple[Rendezvous, Engine, Engine]]:
    """Where they meet, a worker's engine with state and another one's without, in one process."""
    task = CustomTask(
        build_model=lambda: nn.Linear(3, 2), loss_function=lambda m, b: (m(b).sum(), 1), dataset=[0]
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    mesh = make_replica_group(meet, "replica", rank=0, shard=1, tensor=1, device="cpu")
    settings = TrainConfig(
        task=task, steps=9, global_batch=1, seed=5, optimizer=OptimizerConfig(lr=0.1, clip_norm=0.5)
    )
    slot = Slot(replica=0, shard=0, tensor=0)
    with_state, without = (
        Engine(task, settings, slot=slot, mesh=mesh, device="cpu", max_replicas=1) for _ in range(2)
    )
    with_state.initialize()
    yield meet, with_state, without
    leave_replica_group()


def commit_of(step: int) -> Commit:
    return Commit(step=step, loss=1.0, grad_norm=2.0, tokens=4, digests=(), boundary=False)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_kept_steps_are_applied_and_the_gradient_stays(
    pair: tuple[Rendezvous, Engine, Engine], kept: int
) -> None:
    meet, giver, taker = pair
    wires = [Wire(meet, "heal", rank=rank, size=2, device="cpu") for rank in range(2)]
    source = Source(giver, 0, wires[0])
    newcomer = Newcomer(taker, wires[1], clip_norm=0.5)
    source.await_copy()
    for step in range(kept):
        for engine in (giver, taker):
            engine.gradient.fill_(step + 1.0)
        giver.apply(step, scale=commit_of(step).scale(0.5))
        newcomer.keep(commit_of(step))
    in_progress = torch.arange(float(taker.gradient.numel()))
    taker.gradient.copy_(in_progress)
    deadline = time.monotonic() + DEADLINE_S
    while not newcomer.finish():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert newcomer.caught_up
    assert taker.state.digest() == giver.state.digest() and taker.state.optimizer_steps == kept
    assert torch.equal(taker.gradient, in_progress)
    source.close()
    newcomer.close()
