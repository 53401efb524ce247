"""Seeded weights: any box is the slice of the full tensor, and nothing else enters into it."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.errors import ConfigError
from trainer.models.init import (
    FullWeights,
    SeededWeights,
    parameters_on_meta,
    record_recipes,
)

BLOCK = 65_536
PADDING = 131
"""A row of 500 numbers that begins in one block and ends in the next."""

Index = tuple[int, ...]


class Mixed(nn.Module):
    """Parameters of 0 to 3 dimensions, three of them longer than a block, one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(300, 500))
        self.padded = nn.Parameter(torch.zeros(300, 500))
        self.cube = nn.Parameter(torch.zeros(40, 50, 60))
        self.vector = nn.Parameter(torch.zeros(100))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(3, 0))
        self.zeroed = nn.Parameter(torch.zeros(4, 4))
        self.ones = nn.Parameter(torch.zeros(7))
        self.register_buffer("table", torch.arange(5.0))


def initialize(module: nn.Module) -> None:
    assert isinstance(module, Mixed)
    nn.init.uniform_(module.matrix)
    nn.init.normal_(module.matrix, std=0.02)
    nn.init.normal_(module.padded, std=0.02)
    module.padded[PADDING].fill_(7)
    module.cube.uniform_(-1, 1).erfinv_().mul_(0.5).add_(1).clamp_(0.5, 1.5)
    nn.init.uniform_(module.vector, -3, 3)
    nn.init.normal_(module.scalar)
    nn.init.normal_(module.empty)
    nn.init.normal_(module.zeroed)
    nn.init.zeros_(module.zeroed)
    nn.init.ones_(module.ones)


SHAPES: dict[str, Index] = {name: tuple(param.shape) for name, param in Mixed().named_parameters()}


@functools.cache
def source(seed: int = 1) -> SeededWeights:
    with parameters_on_meta():
        model = Mixed()
    return SeededWeights(record_recipes(model, initialize), seed)


@functools.cache
def full(name: str, seed: int = 1) -> torch.Tensor:
    shape = SHAPES[name]
    return source(seed).read(name, shape, (0,) * len(shape), shape)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[str, Index, Index]:
    name = draw(st.sampled_from(sorted(SHAPES)))
    bounds = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in SHAPES[name]]
    return name, tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)


@settings(deadline=None, max_examples=60)
@given(box=boxes())
def test_any_box_is_the_slice_of_the_full_tensor(box: tuple[str, Index, Index]) -> None:
    name, offsets, sizes = box
    found = source().read(name, SHAPES[name], offsets, sizes)
    where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    assert found.shape == sizes
    assert found.dtype == torch.float32
    assert torch.equal(found, full(name)[where])


def test_a_block_is_the_operations_replayed_on_its_own_generator() -> None:
    """The definition, frozen: another one would change the weights of every seed."""
    expected = []
    for index in range(3):
        key = hashlib.sha256(f"1/matrix/{index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") // 2)
        expected.append(torch.empty(BLOCK).normal_(0.0, 0.02, generator=generator))
    assert torch.equal(full("matrix").flatten(), torch.cat(expected)[:150_000])


def test_a_row_that_is_filled_after_the_rest_lies_where_it_should() -> None:
    assert PADDING * 500 < BLOCK < (PADDING + 1) * 500
    recipes = {"padded": source()._recipes["matrix"]}
    expected = SeededWeights(recipes, 1).read("padded", (300, 500), (0, 0), (300, 500))
    expected[PADDING] = 7
    assert torch.equal(full("padded"), expected)


def test_seeds_names_and_blocks_differ() -> None:
    again = SeededWeights(source()._recipes, 1)
    assert torch.equal(again.read("vector", (100,), (0,), (100,)), full("vector"))
    assert not torch.equal(full("vector", 2), full("vector"))
    flat = full("matrix").flatten()
    assert not torch.equal(flat[:1000], flat[BLOCK : BLOCK + 1000])
    same = SeededWeights({name: source()._recipes["vector"] for name in "ab"}, 1)
    one, other = (same.read(name, (100,), (0,), (100,)) for name in "ab")
    assert not torch.equal(one, other)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    source(3).read("vector", (100,), (0,), (100,))
    assert torch.equal(torch.get_rng_state(), before)


def test_distributions_are_the_modules_own() -> None:
    """Bounds of five standard errors."""
    matrix, vector = full("matrix"), full("vector")
    assert abs(matrix.mean()) < 5 * 0.02 / math.sqrt(matrix.numel())
    assert abs(matrix.std() / 0.02 - 1) < 5 / math.sqrt(2 * matrix.numel())
    assert -3 <= vector.min() < -2
    assert 2 < vector.max() < 3
    cube = full("cube")
    assert (cube.min().item(), cube.max().item()) == (0.5, 1.5)
    # |0.5 * erfinv(u)| < 0.25 where |u| < erf(0.5), and u is uniform on (-1, 1).
    share = ((cube - 1).abs() < 0.25).float().mean().item()
    assert abs(share - math.erf(0.5)) < 5 * math.sqrt(0.25 / cube.numel())


def test_only_the_last_fill_counts() -> None:
    assert torch.equal(full("zeroed"), torch.zeros(4, 4))
    assert torch.equal(full("ones"), torch.ones(7))
    assert full("scalar").shape == ()
    assert full("empty").shape == (3, 0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_parameter("absent", None)
        self.register_buffer("table", torch.arange(5.0))


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    with parameters_on_meta():
        model = Tied()
    assert all(param.is_meta for param in model.parameters())
    assert torch.equal(model.get_buffer("table"), torch.arange(5.0))
    assert model.second.weight is model.first.weight
    assert model.first.weight.requires_grad
    assert not model.frozen.requires_grad
    assert model.absent is None


def test_outside_of_it_parameters_are_real_again() -> None:
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta


Operation = Callable[[torch.Tensor], object]


def seeded(*operations: Operation) -> torch.Tensor:
    """The weight that `operations`, one after the other, make on a meta parameter of 4 x 4."""
    with parameters_on_meta():
        model = nn.Linear(4, 4, bias=False)

    def initialize(module: nn.Linear) -> None:
        for operation in operations:
            operation(module.weight)

    recipes = record_recipes(model, initialize)
    return SeededWeights(recipes, 0).read("weight", (4, 4), (0, 0), (4, 4))


def test_operations_on_the_data_of_a_parameter_count() -> None:
    normal = seeded(torch.Tensor.normal_)
    assert torch.equal(seeded(lambda weight: weight.data.normal_()), normal)
    assert torch.equal(seeded(torch.Tensor.normal_, lambda weight: weight.data.mul_(3)), 3 * normal)
    assert torch.equal(seeded(lambda weight: weight.view(-1).normal_()), normal)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 3), slice(3, 4)])
def test_a_part_may_be_set_to_a_constant(rows: slice) -> None:
    expected = seeded(torch.Tensor.normal_)
    expected[rows] = 0
    assert torch.equal(seeded(torch.Tensor.normal_, lambda w: w.data[rows].zero_()), expected)
    again = seeded(torch.Tensor.zero_, lambda w: w[rows].fill_(2), torch.Tensor.normal_)
    assert torch.equal(again, seeded(torch.Tensor.normal_))


def record(*operations: Operation) -> ConfigError:
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            for operation in operations:
                operation(module.weight)

    with pytest.raises(ConfigError) as caught:
        record_recipes(model, initialize)
    assert caught.value.field == "train.task.model"
    assert caught.value.value == "0.weight"
    assert "CustomTask" in caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda weight: weight.copy_(torch.eye(4)), "copy_"),
        (lambda weight: weight.exponential_(), "exponential_"),
        (lambda weight: weight.normal_().t_(), "t_"),
        (lambda weight: torch._foreach_zero_([weight]), "_foreach_zero_"),
        (lambda weight: torch.mul(weight, 2, out=weight), "mul"),
        (nn.init.eye_, "eye"),
    ],
)
def test_an_operation_that_is_not_elementwise_is_refused(operation: Operation, name: str) -> None:
    assert f"its initialisation uses {name} in a way" in record(operation).fact


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda weight: weight.mul_(torch.ones(4, 4, device="meta")), "mul_"),
        (lambda weight: weight.mul_(torch.tensor(2.0)), "mul_"),
        (lambda weight: weight.add_(weight), "add_"),
        (lambda weight: weight.clamp_(max=weight), "clamp_"),
        (lambda weight: weight.t().zero_(), "zero_"),
        (lambda weight: weight[:, 0].zero_(), "zero_"),
        (lambda weight: weight[0].normal_(), "normal_"),
        (lambda weight: weight[0].mul_(2), "mul_"),
    ],
)
def test_an_operation_with_tensors_or_on_an_uneven_part_is_refused(
    operation: Operation, name: str
) -> None:
    error = record(torch.Tensor.normal_, operation)
    assert f"its initialisation uses {name} in a way" in error.fact


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda weight: weight.mul_(3), "mul_"),
        (lambda weight: weight.add_(3), "add_"),
        (lambda weight: weight[0].zero_(), "zero_"),
    ],
)
def test_the_first_operation_must_set_all_of_the_parameter(operation: Operation, name: str) -> None:
    assert f"its initialisation uses {name} in a way" in record(operation).fact


def replace_data(weight: torch.Tensor) -> None:
    weight.data = torch.ones(4, 4, device="meta")


@pytest.mark.parametrize(
    "operations",
    [
        (torch.Tensor.numel,),
        (nn.init.orthogonal_,),  # does nothing on the meta device
        (torch.Tensor.normal_, replace_data),
        (torch.Tensor.normal_, replace_data, torch.Tensor.zero_),
    ],
)
def test_a_parameter_that_no_recipe_makes_is_refused(operations: tuple[Operation, ...]) -> None:
    assert "leaves it and 1 others unset" in record(*operations).fact


def test_whole_tensors_are_cut_into_boxes() -> None:
    cube = torch.arange(60.0).reshape(3, 4, 5)
    weights = FullWeights({"cube": cube, "scalar": torch.tensor(7.0)})
    assert torch.equal(weights.read("cube", (3, 4, 5), (1, 0, 2), (2, 3, 1)), cube[1:3, 0:3, 2:3])
    assert weights.read("scalar", (), (), ()) == 7
