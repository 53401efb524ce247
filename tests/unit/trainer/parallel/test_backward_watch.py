"""When the gradients of a parameter group are final, and that they are there when it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from trainer.parallel.apply import local_tensor
from trainer.parallel.backward import BackwardWatch, groups_in_backward_order

LAYERS = 3


class Stack(nn.Module):
    """An embedding, layers, and a head; `visits` are the layers in the order of their calls."""

    def __init__(self, visits: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.visits = visits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for index in self.visits:
            x = self.visit(self.layers[index], x)
        return x

    def visit(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x))


class Checkpointed(Stack):
    def visit(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(checkpoint(layer, x, use_reentrant=True))


class ShortOfOne(Stack):
    """The second call of layer 1 has no part in the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        self.layers[1](x)
        return result


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: Stack) -> Stack:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module) -> list[list[torch.Tensor | None]]:
    return [
        [None if p.grad is None else local_tensor(p.grad).clone() for p in group]
        for group in groups_in_backward_order(model)
    ]


def watched(
    model: Stack, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], ranks: int = 1
) -> list[int]:
    """What the watch says in a second step; checks that it was true when it said so. With several
    `ranks` FSDP2 reduces, here over one, also what has no gradient."""
    watch = BackwardWatch(model, ranks)
    for step in range(2):
        said: list[tuple[int, list[list[torch.Tensor | None]]]] = []
        value = loss(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(step)))

        def say(n: int, said: list[Any] = said) -> None:
            said.append((n, gradients(model)))

        with watch.backward(say):
            value.backward()
        final = gradients(model)
        for finished, seen in said:
            for early, late in zip(seen[:finished], final[:finished], strict=True):
                assert early and late
                for a, b in zip(early, late, strict=True):
                    assert a is not None and b is not None and torch.equal(a, b)
        model.zero_grad(set_to_none=True)
    return [finished for finished, _ in said]


def one_pass(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def two_passes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * model(-x)).sum()


def one_pass_in_eval_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As of a virtual adversary: both passes have a gradient."""
    trained = model(x)
    model.eval()
    other = model(-x)
    model.train()
    return (trained * other).sum()


def two_passes_in_eval_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    value = two_passes(model, x)
    model.train()
    return value


def weighed_by_a_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss takes a gradient of its own, before there is a backward."""
    value = one_pass(model, x.requires_grad_())
    (slope,) = torch.autograd.grad(value, x, retain_graph=True)
    return value * slope.norm()


def test_groups_come_last_layer_first_and_the_root_last() -> None:
    model = shard(Stack())
    expected = [[*layer.parameters()] for layer in model.layers[::-1]]
    expected.append([*model.embedding.parameters()])
    got = groups_in_backward_order(model)
    assert [[id(p) for p in group] for group in got] == [[id(p) for p in g] for g in expected]


def test_each_group_is_finished_while_backward_goes_on() -> None:
    assert watched(shard(Stack()), one_pass) == [1, 2, 3]


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Stack(), two_passes),
        (Stack(visits=(0, 1, 2, 1, 0)), one_pass),
        (Stack(visits=(0, 1)), one_pass),
        (Checkpointed(), one_pass),
        (Checkpointed(visits=(0, 1, 2, 1)), one_pass),
        (ShortOfOne(), one_pass),
    ],
    ids=["two passes", "layers twice", "layer unused", "recomputed", "recomputed twice", "unused"],
)
def test_no_group_is_finished_before_its_last_gradient(
    model: Stack, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    said = watched(shard(model), loss)
    assert said == sorted(said)


@pytest.mark.parametrize("loss", [one_pass_in_eval_mode, two_passes_in_eval_mode])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pass_in_eval_mode_counts_where_it_has_a_gradient(
    ranks: int, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    """Over several ranks FSDP2 reduces after each pass, zeros at first."""
    said = watched(shard(Stack()), loss, ranks)
    assert said == ([1, 2, 3] if ranks > 1 else sorted(said))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_the_loss_asks_for_finishes_no_group(ranks: int) -> None:
    assert watched(shard(Stack()), weighed_by_a_gradient, ranks) == [1, 2, 3]


def test_frozen_layers_are_no_groups_and_hold_nothing_up() -> None:
    model = Stack()
    model.layers[1].requires_grad_(False)
    assert watched(shard(model), one_pass) == [1, 2]


def test_an_evaluation_does_not_confuse_the_count() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        return one_pass(model, x)

    assert watched(shard(Stack()), loss) == [1, 2, 3]
