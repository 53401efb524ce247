"""An evaluation is of the weights as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.data_plane import SavingLink, WorkerResult, make_engine, run_layout
from tests.support.fabric import GLOO, FabricGroup
from tests.support.member import build_model, loss_of, small_task, small_train
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.loop.between_steps import BetweenSteps
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.phases import Phase
from trainer.tasks.custom import CustomTask

STEPS = 3


@pytest.fixture
def meet() -> Iterator[Rendezvous]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    leave_replica_group()


def between_steps(
    meet: Rendezvous, task: CustomTask, entered: list[Phase]
) -> tuple[BetweenSteps, SavingLink]:
    """What a lone replica does between steps; `entered` gets the phases."""

    def enter(step: int, phase: Phase) -> None:
        entered.append(phase)

    engine, link = make_engine(0, meet, task, small_train(STEPS)), SavingLink()
    cross = FabricGroup(
        GLOO, meet, "alone", lanes=[(0, 1)], total_lanes=2, rank=0, leave_now=lambda: False
    )
    due = BetweenSteps(
        engine,
        cross,
        progress=Progress(),
        config=LoopConfig(
            lanes=2, save_every=None, compare_every=None, max_nonfinite_steps=1, until=STEPS
        ),
        link=link,
        samples=len(task.train_data()),
        enter=enter,
    )
    return due, link


def loss_with(weights: dict[str, torch.Tensor], data: torch.Tensor) -> float:
    """The mean loss, by a model that FSDP2 knows nothing of."""
    model = build_model()
    model.load_state_dict(weights)
    total, terms = loss_of(model, data)
    return float(total) / terms


def test_a_replica_without_lanes_evaluates_what_it_has_become(meet: Rendezvous) -> None:
    """It applies steps, and has no backward, after which FSDP2 would gather the weights anew."""
    data = small_task().dataset[:8]
    due, link = between_steps(meet, replace(small_task(), eval_dataset=data), [])
    engine = due.engine
    expected = []
    for step in range(STEPS):
        weights = {
            name.removeprefix("param/"): tensor.clone()
            for name, tensor in engine.state.tensors().items()
            if name.startswith("param/")
        }
        expected.append(loss_with(weights, data))
        due.evaluate()
        assert engine.model.training
        engine.gradient.fill_(1.0)
        engine.apply(step, scale=1.0)
    assert len(set(expected)) == STEPS
    assert [loss for _, loss, _ in link.evaluations] == pytest.approx(expected, rel=1e-6)


def noisy_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return loss_of(model, batch + torch.randn(batch.shape))


class Augmented:
    """Held-out samples that are drawn."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8)


@pytest.mark.parametrize(
    "changes",
    [{"eval_dataset": small_task().dataset[:8], "loss_function": noisy_loss},
     {"eval_dataset": Augmented()}],
    ids=["loss", "items"],
)  # fmt: skip
def test_what_an_evaluation_draws_does_not_go_by_what_was_computed_before(
    meet: Rendezvous, changes: dict[str, Any]
) -> None:
    """After a fault a replica has had other lanes, and so drawn other numbers."""
    due, link = between_steps(meet, replace(small_task(), **changes), [])
    for seed in range(2):
        torch.manual_seed(seed)
        due.evaluate()
    due.progress.step += 1
    due.evaluate()
    (_, first, _), (_, again, _), (_, later, _) = link.evaluations
    assert first == again != later


def model_of_batches() -> nn.Module:
    """Its numbers depend on all samples of a micro-batch, and of one there are none."""
    norm = nn.BatchNorm1d(64, track_running_stats=False)
    return nn.Sequential(nn.Linear(8, 64), norm, nn.Linear(64, 16))


def test_a_rank_with_nothing_left_evaluates_as_many_as_the_others() -> None:
    """Two samples are held out, of which the first of two ranks takes both."""
    held_out = small_task().dataset[:2]
    task = replace(small_task(), build_model=model_of_batches, eval_dataset=held_out)
    train = replace(small_train(1, shard=2), task=task)
    results = run_layout(task, train, replicas=1, lanes=2)
    assert all(isinstance(result, WorkerResult) for result in results), results
    assert [[terms for _, _, terms in result.evaluations] for result in results] == [[2 * 16]] * 2
