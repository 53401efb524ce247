"""A dimension of the mesh that is added from outside the package: its workers divide the tokens of
each sample, and speak to each other inside the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from trainer.config import ParallelConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.parallel.dims import MeshDim
from trainer.tasks.custom import CustomTask

TOKENS, SAMPLES, LANES = 6, 8, 2


class Total(torch.autograd.Function):
    """The sum over a group; its gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone()
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        return total, None


class Mixer(nn.Module):
    """What a token becomes depends on all tokens of its sample."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 1)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        mean = Total.apply(x.sum(dim=1, keepdim=True), self.group) / TOKENS
        return self.out(torch.tanh(x + mean))


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(batch) - batch.sum(dim=-1, keepdim=True)).square().sum(), batch[..., 0].numel()


@dataclass(frozen=True)
class Tokens:
    """Each worker takes an equal stretch of every sample's tokens."""

    degree: int
    name: str = "tokens"

    def check(self, train: TrainConfig) -> None:
        if TOKENS % self.degree:
            raise ConfigError("tokens", self.degree, f"does not divide {TOKENS}", "Use a divisor")

    def convert(self, model: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(model, Mixer)
        model.group = mesh.get_group()

    def part(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return batch.chunk(self.degree, dim=1)[index]


def samples(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, 3, generator=generator) for _ in range(SAMPLES)]


def train_with(shard: int, *others: MeshDim, workers_per_node: int | None = None) -> TrainConfig:
    task = CustomTask(
        build_model=Mixer,
        loss_function=loss_of,
        dataset=samples(1),
        eval_dataset=samples(2),
    )
    return TrainConfig(
        task=task,
        steps=3,
        global_batch=4,
        parallel=ParallelConfig(shard=shard, others=others, workers_per_node=workers_per_node),
        seed=3,
    )


def run(replicas: int, shard: int, *others: MeshDim, **changes: Any) -> list[WorkerResult]:
    train = train_with(shard, *others, **changes)
    train.check(LANES)
    results = run_layout(train.task.prepare(train, ""), train, replicas=replicas, lanes=LANES)
    assert all(isinstance(result, WorkerResult) for result in results), results
    return results


@pytest.fixture(scope="module")
def whole() -> list[WorkerResult]:
    return run(1, 1)


@pytest.mark.parametrize(("replicas", "shard", "degree"), [(1, 1, 3), (1, 2, 2), (2, 1, 2)])
def test_a_divided_sample_trains_as_a_whole_one(
    whole: list[WorkerResult], replicas: int, shard: int, degree: int
) -> None:
    divided = run(replicas, shard, Tokens(degree))
    for worker in divided:
        assert worker.digests == whole[0].digests
        assert worker.losses == pytest.approx(whole[0].losses, rel=1e-6)
        assert worker.norms == pytest.approx(whole[0].norms, rel=1e-5)
        ((step, loss, tokens),), ((_, wanted, of),) = worker.evaluations, whole[0].evaluations
        assert (step, tokens) == (3, of)
        assert loss == pytest.approx(wanted, rel=1e-6)
    expected = full_parameters(whole)
    for name, value in full_parameters(divided[: shard * degree]).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_bits_do_not_depend_on_the_number_of_replicas() -> None:
    one, two = run(1, 1, Tokens(2)), run(2, 1, Tokens(2))
    assert [worker.losses for worker in two] == [one[0].losses] * 4
    for index, worker in enumerate(two):
        for name, (_, _, value) in one[index % 2].local.items():
            assert torch.equal(worker.local[name][2], value)


def test_parts_of_a_sample_lie_on_one_of_two_nodes() -> None:
    """Gathered and scattered in two levels, it trains as in one, but for the order of sums."""
    flat = run(1, 2, Tokens(2))
    one, two = run(1, 2, Tokens(2), workers_per_node=2), run(2, 2, Tokens(2), workers_per_node=2)
    assert one[0].losses == pytest.approx(flat[0].losses, rel=1e-6)
    assert [worker.losses for worker in two] == [one[0].losses] * 8
    for index, worker in enumerate(two):
        for name, (_, _, value) in one[index % 4].local.items():
            assert torch.equal(worker.local[name][2], value)


@dataclass(frozen=True)
class Named(Tokens):
    name: str = "shard"


@pytest.mark.parametrize("others", [(Tokens(0),), (Tokens(4),), (Named(2),), (Tokens(2),) * 2])
def test_a_dimension_that_cannot_be_is_refused(others: tuple[MeshDim, ...]) -> None:
    with pytest.raises(ConfigError):
        train_with(1, *others).check(LANES)


@pytest.mark.parametrize(
    "name",
    ["lanes", "spares", "replica", "replicas", "node", "nodes", "fsdp", "regather", "apart"],
)
def test_a_name_that_records_have_for_something_else_is_refused(name: str) -> None:
    """Of a dimension called lanes, the report's MFU would not have counted the workers."""
    with pytest.raises(ConfigError, match=rf"others = '{name}'.*lanes, node, nodes"):
        train_with(1, Tokens(2, name)).check(LANES)
