"""Activations that are computed again: the same bits, and less that is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from tests.support.data_plane import WorkerResult, assert_same_bits, run_layout
from tests.support.layered_llama import LAYERS, flat, llama, loss_of, tokens
from tests.support.tiny import tiny_task, tiny_train, write_text
from trainer.config import TrainConfig
from trainer.engine.build import build_model
from trainer.errors import ConfigError
from trainer.float8 import products
from trainer.float8.config import Float8
from trainer.float8.scales import Scaled
from trainer.models.family import HUGGING_FACE
from trainer.models.init import FullWeights
from trainer.parallel.recompute import Recompute, recompute_blocks
from trainer.tasks.custom import CustomTask

Train = Callable[[Recompute | None, int, int], list[WorkerResult]]

LANES = 2


def train_with(recompute: Recompute | float | None) -> TrainConfig:
    task = CustomTask(build_model=llama, loss_function=loss_of, dataset=tokens(1))
    return TrainConfig(task=task, steps=1, global_batch=LANES, recompute=recompute)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains a Llama of four layers; the result of every worker."""
    root = tmp_path_factory.mktemp("recompute")
    text = write_text(root / "text")
    task = tiny_task(text, num_hidden_layers=LAYERS, attention_dropout=0.1)  # to be drawn alike

    @functools.cache
    def train(recompute: Recompute | None, shard: int, tensor: int) -> list[WorkerResult]:
        config = tiny_train(
            text, shard=shard, tensor=tensor, task=task, steps=3, recompute=recompute
        )
        config.check(LANES)
        prepared = task.prepare(config, str(root / "cache"))
        results = run_layout(prepared, config, replicas=1, lanes=LANES)
        assert all(isinstance(result, WorkerResult) for result in results), results
        return results

    return train


@pytest.mark.parametrize(
    ("shard", "tensor"),
    [(2, 1), *(pytest.param(*degrees, marks=pytest.mark.soak) for degrees in ((1, 1), (1, 2)))],
)
@pytest.mark.parametrize("recompute", ["full", "selective", 2])
def test_the_bits_are_the_same(
    trained: Train, recompute: Recompute, shard: int, tensor: int
) -> None:
    """With dropout. Without, in all layouts: test_matrix.py."""
    plain, again = trained(None, shard, tensor), trained(recompute, shard, tensor)
    for one, other in zip(plain, again, strict=True):
        assert_same_bits(one, other)


def kept_bytes(recompute: Recompute | None) -> int:
    """What is kept for backward, each memory once, parameters aside."""
    torch.manual_seed(0)
    model = llama().train()
    if recompute is not None:
        recompute_blocks(model, HUGGING_FACE.blocks(model), recompute)
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}
    held: list[torch.Tensor] = []  # so that no memory is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = loss_of(model, torch.stack(tokens(1)))
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    return sum(kept.values())


def test_less_is_kept() -> None:
    plain, half, full = kept_bytes(None), kept_bytes(2), kept_bytes("full")
    assert full < 0.3 * plain
    assert full < half < 0.75 * plain


def operations(recompute: Recompute | None, *, bits: int = 32) -> int:
    """Of a forward and a backward."""
    model = llama().train()
    if bits == 8:
        model, _ = Float8().convert(model, FullWeights({}))
    if recompute is not None:
        recompute_blocks(model, HUGGING_FACE.blocks(model), recompute)
    with FlopCounterMode(display=False) as counter:
        loss_of(model, torch.stack(tokens(1)))[0].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("as_on_gpus", [False, True])
def test_half_of_the_products_are_done_again(
    bits: int, as_on_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a selection keeps is not seen by hooks on saved tensors."""
    if as_on_gpus:
        monkeypatch.setattr(products, "_product_on_cpu", scaled_mm)
    plain, full = operations(None, bits=bits), operations("full", bits=bits)
    again = (operations("selective", bits=bits) - plain) / (full - plain)
    assert 0.25 < again < 0.75
    assert 0.25 < (operations(2, bits=bits) - plain) / (full - plain) < 0.75


def scaled_mm(a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """Torch's own, which a CPU has, too."""
    return torch._scaled_mm(a.data, b.data.t(), a.inverse, b.inverse, out_dtype=dtype)


def test_an_evaluation_keeps_nothing_and_recomputes_nothing() -> None:
    model = llama()
    recompute_blocks(model, HUGGING_FACE.blocks(model), "full")
    calls = []
    model.get_submodule("model.layers.0.self_attn").register_forward_hook(
        lambda *_: calls.append(1)
    )
    batch = torch.stack(tokens(1))
    with torch.no_grad():
        loss_of(model.eval(), batch)
    assert len(calls) == 1
    loss_of(model.train(), batch)[0].backward()
    assert len(calls) == 3


def test_names_stay_what_they_are() -> None:
    plain, changed = llama(), llama()
    recompute_blocks(changed, HUGGING_FACE.blocks(changed), "full")
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in changed.named_modules()] == [n for n, _ in plain.named_modules()]


@pytest.mark.parametrize("recompute", [0, -1])
def test_a_number_below_one_is_refused(recompute: int) -> None:
    with pytest.raises(ConfigError, match=r"train\.recompute"):
        train_with(recompute).check(LANES)


@pytest.mark.parametrize(("recompute", "compile"), [(1.5, "on"), (0.0, "on"), (0.5, "off")])
def test_a_fraction_is_one_of_compiled_blocks(recompute: float, compile: Any) -> None:
    train = replace(train_with(recompute), compile=compile)
    with pytest.raises(ConfigError, match=r"train\.recompute = .*(below 1|compile is 'off')"):
        train.check(LANES)
    replace(train, recompute=0.5, compile="on").check(LANES)


@pytest.mark.parametrize("recompute", ["some", True])
def test_what_is_no_way_to_recompute_is_refused(recompute: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.recompute"):
        train_with(recompute)


def test_a_model_without_blocks_is_refused() -> None:
    task = CustomTask(build_model=flat, loss_function=loss_of, dataset=tokens(1))
    train = TrainConfig(task=task, steps=1, global_batch=2, recompute="full")
    with pytest.raises(ConfigError, match="no ModuleList"):
        build_model(task.prepare(train, ""), train)
