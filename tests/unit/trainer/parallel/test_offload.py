"""Activations that wait on the host: the same bits, fetched ahead, and nothing left by a fault."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.support.data_plane import WorkerResult, assert_same_bits, run_layout
from tests.support.layered_llama import LAYERS, LENGTH, flat, llama, loss_of, tokens
from tests.support.measured_peak import make_loop, take_step
from tests.support.small_llama import small_train
from tests.support.tiny import tiny_task, tiny_train, write_text
from trainer.backend.groups import leave_replica_group, make_replica_group, without_peers
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OffloadConfig, TrainConfig
from trainer.dryrun.shape import prepare_shape
from trainer.engine.build import build_model
from trainer.engine.engine import Engine
from trainer.errors import ConfigError
from trainer.models.family import HUGGING_FACE
from trainer.parallel.compiled import compile_blocks
from trainer.parallel.host_memory import Flight, ThreadMemory
from trainer.parallel.layout import ParallelDims
from trainer.parallel.offload import Offload
from trainer.parallel.recompute import Recompute, recompute_blocks
from trainer.tasks.custom import CustomTask

INPUT_BYTES = 16 * LENGTH * 32 * 4
"""A block's input: 16 samples of 16 tokens, 32 numbers wide."""
EVERYTHING = OffloadConfig(horizon=1, least_bytes=1)


class Recorded(ThreadMemory):
    """Host memory that tells a diary what is copied, and when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.diary: list[str] = []
        self.most_bytes = 0
        self.flights = weakref.WeakSet[_Told]()

    def take(self, size: int) -> torch.Tensor:
        block = super().take(size)
        self.most_bytes = max(self.most_bytes, self.held_bytes - self.free_bytes)
        return block

    def _copy(self, block: torch.Tensor, values: torch.Tensor, *, back: bool) -> Flight:
        what = "load" if back else "store"
        self.diary.append(what)
        told = _Told(self.diary, what, super()._copy(block, values, back=back))
        self.flights.add(told)
        return told


class _Told:
    def __init__(self, diary: list[str], what: str, flight: Flight) -> None:
        self._diary, self._what, self._flight = diary, what, flight
        self.under_way = True

    def wait(self) -> None:
        if self.under_way:
            self._diary.append(f"{self._what} awaited")
        self.under_way = False
        self._flight.wait()

    def drop(self) -> None:
        self.under_way = False
        self._flight.drop()


def offloaded(
    host: ThreadMemory, config: OffloadConfig = EVERYTHING, recompute: Recompute | None = None
) -> nn.Module:
    """The Llama, in training."""
    torch.manual_seed(0)
    model = llama().train()
    blocks = HUGGING_FACE.blocks(model)
    if recompute is not None:
        recompute_blocks(model, blocks, recompute)
    Offload(config.horizon, config.least_bytes, host).cover(model, blocks)
    return model


def learn(model: nn.Module) -> list[torch.Tensor]:
    """Loss and gradients of a micro-batch."""
    model.zero_grad()
    loss = loss_of(model, torch.stack(tokens(1)))[0]
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]  # type: ignore[union-attr]


@functools.cache
def expected() -> list[torch.Tensor]:
    """By a model that nothing was done to."""
    torch.manual_seed(0)
    return learn(llama().train())


def equal(found: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected(), strict=True))


@pytest.mark.parametrize(
    ("recompute", "horizon"),
    [(None, 1), (None, 2), ("full", 1), ("full", 3), ("selective", 2), (2, 1)],
)
def test_the_bits_are_the_same(recompute: Recompute | None, horizon: int) -> None:
    host = Recorded()
    model = offloaded(host, OffloadConfig(horizon=horizon, least_bytes=1), recompute)
    assert equal(learn(model))
    held = host.held_bytes
    assert held == host.free_bytes > 0
    assert equal(learn(model))
    assert held == host.held_bytes  # the same blocks


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in HUGGING_FACE.blocks(model)]


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_a_block_is_fetched_so_many_blocks_ahead(horizon: int) -> None:
    """One input a block moves; the rotation's tables are below the least size."""
    host = Recorded()
    config = OffloadConfig(horizon=horizon, least_bytes=INPUT_BYTES)
    model = offloaded(host, config, "full")
    for index, block in enumerate(blocks_of(model)):
        # Its first norm: in forward, and when backward computes the block again.
        block.input_layernorm.register_forward_hook(  # type: ignore[union-attr]
            lambda *_, name=f"block {index}": host.diary.append(name)
        )
    learn(model)
    moved = LAYERS - horizon
    forward, backward = [], []
    for index in range(LAYERS):
        if index >= horizon:
            forward += ["store awaited"]
        forward += ["store", f"block {index}"] if index < moved else [f"block {index}"]
    for index in reversed(range(LAYERS)):
        if index >= horizon:
            backward += ["load"]
        if index < moved:
            backward += ["load awaited"]
        backward += [f"block {index}"]
    assert host.diary == forward + backward
    assert host.most_bytes == moved * INPUT_BYTES


def test_what_is_saved_twice_moves_once() -> None:
    """Three products save the normed input of a block, each as a view of its own."""
    host = Recorded()
    learn(offloaded(host))
    per_block = host.diary.count("store") / (LAYERS - 1)
    assert host.diary.count("load") == host.diary.count("store")
    saved: list[torch.Tensor] = []
    model = llama().train()
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: packed):
        block = blocks_of(model)[0]
        hidden = torch.zeros(2, 16, 32, requires_grad=True)
        block(hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(16)[None]))  # type: ignore[operator,union-attr]
    weights = {param.untyped_storage().data_ptr() for param in block.parameters()}
    others = [t for t in saved if t.untyped_storage().data_ptr() not in weights]
    storages = {tensor.untyped_storage().data_ptr() for tensor in others}
    assert per_block <= len(storages) < len(others)


def test_small_tensors_and_weights_stay() -> None:
    host = Recorded()
    assert equal(learn(offloaded(host, OffloadConfig(horizon=1, least_bytes=2**30))))
    assert host.held_bytes == 0
    block = nn.Linear(64, 64, bias=False)
    model = nn.Sequential(block, nn.Linear(64, 64)).train()
    Offload(1, 64 * 64 * 4, host).cover(model, ["0", "1"])
    model(torch.zeros(2, 64, requires_grad=True)).sum().backward()
    assert host.held_bytes == 0


class Lost(Exception):
    pass


@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_fault_in_backward_leaves_nothing_behind(recompute: Recompute | None) -> None:
    host = Recorded()
    model = offloaded(host, OffloadConfig(horizon=2, least_bytes=1), recompute)
    assert equal(learn(model))
    held, loads = host.held_bytes, []

    def lose(*_: Any) -> None:
        loads.append(host.diary.count("load"))
        raise Lost

    handle = blocks_of(model)[2].register_full_backward_hook(lose)
    before = host.diary.count("load")
    with pytest.raises(Lost):
        learn(model)
    handle.remove()
    assert loads
    assert loads[0] > before  # in the middle of it, with fetched memory
    gc.collect()  # what the exception's frames held
    assert not [flight for flight in host.flights if flight.under_way]
    assert host.free_bytes == host.held_bytes == held
    assert equal(learn(offloaded(host, OffloadConfig(horizon=2, least_bytes=1), recompute)))
    assert host.held_bytes == held  # the next model has the same blocks


def test_a_graph_that_is_let_go_of_gives_back_its_memory() -> None:
    host = Recorded()
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layers).train()
    Offload(1, 1, host).cover(model, ["0", "1", "2"])
    loss = model(torch.zeros(2, 64, requires_grad=True)).sum()
    assert host.free_bytes == 0 < host.held_bytes
    del loss
    assert host.free_bytes == host.held_bytes
    assert not [flight for flight in host.flights if flight.under_way]


def test_two_forwards_before_their_backwards() -> None:
    host = Recorded()
    model = offloaded(host, OffloadConfig(horizon=2, least_bytes=1))
    batch = torch.stack(tokens(1))
    first, second = loss_of(model, batch)[0], loss_of(model, batch)[0]
    first.backward()
    once = [param.grad.clone() for param in model.parameters()]  # type: ignore[union-attr]
    assert equal([first.detach(), *once])
    model.zero_grad()
    second.backward()
    assert equal([second.detach(), *(param.grad for param in model.parameters())])  # type: ignore[list-item]
    assert host.free_bytes == host.held_bytes


class Rewrites(nn.Module):
    """A block that changes tensors in place."""

    def __init__(self, how: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.product, self._how = nn.Linear(64, 64), how

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._how(self.product, hidden)


def rewriting(
    how: Callable[[nn.Module, torch.Tensor], torch.Tensor], recompute: Recompute | None
) -> nn.Module:
    """Three such blocks behind a product."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(Rewrites(how) for _ in range(3))).train()
    if recompute is not None:
        recompute_blocks(model, ["1", "2", "3"], recompute)
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randn(4, 64)).square().sum().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("least_bytes", [1, 2**30])
@pytest.mark.parametrize(
    ("how", "recompute"),
    [
        pytest.param(
            lambda product, hidden: torch.tanh(product(hidden)).mul_(3), None, id="its own output"
        ),
        pytest.param(
            lambda product, hidden: hidden.add_(torch.tanh(product(hidden))), None, id="its input"
        ),
        pytest.param(
            lambda product, hidden: hidden.add_(torch.tanh(product(hidden))),
            "full",
            id="its input, recomputed",
        ),
        pytest.param(
            lambda product, hidden: torch.tanh(product(hidden.mul_(2))),
            None,
            id="the last block's output",
        ),
    ],
)
def test_what_is_changed_in_place_is_an_error_as_without(
    how: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    recompute: Recompute | None,
    least_bytes: int,
) -> None:
    """Torch compares no versions of what is saved under hooks. Moved or not, by whichever block."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(rewriting(how, recompute))
    host, model = Recorded(), rewriting(how, recompute)
    Offload(1, least_bytes, host).cover(model, ["1", "2", "3"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model)
    gc.collect()  # what the exception's frames held
    assert host.free_bytes == host.held_bytes
    assert (host.held_bytes > 0) == (least_bytes == 1)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda product, hidden: product(hidden).mul_(3), id="what is not saved"),
        pytest.param(lambda product, hidden: product(hidden).relu_(), id="an activation"),
        pytest.param(
            lambda product, hidden: nn.functional.dropout(product(hidden), 0.5, inplace=True),
            id="dropout",
        ),
    ],
)
def test_changes_in_place_that_backward_allows_have_the_same_bits(
    how: Callable[[nn.Module, torch.Tensor], torch.Tensor], recompute: Recompute | None
) -> None:
    model = rewriting(how, recompute)
    Offload(1, 1, Recorded()).cover(model, ["1", "2", "3"])
    for found, plain in zip(gradients(model), gradients(rewriting(how, recompute)), strict=True):
        assert torch.equal(found, plain)


def test_a_spread_tensor_s_changes_in_place_count() -> None:
    """They count in the DTensor's version, not in its part's."""
    unused = list[torch.Tensor]()

    def spoils(_: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden).mul_(3)

    def saves_twice(_: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 3
        unused.append(hidden.square())  # keeps what is no more, and backward never comes to it
        return hidden.add_(1).square()

    def gradient(how: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        hidden = torch.ones(4, 64, requires_grad=True)
        model = nn.Sequential(Rewrites(how), Rewrites(how)).train()
        Offload(1, 1, Recorded()).cover(model, ["0", "1"])
        model(DTensor.from_local(hidden, mesh.fsdp, [Shard(0)])).to_local().sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    with without_peers(ParallelDims(shard=2), "cpu") as mesh:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(spoils)
        # y = (3 * (3x + 1)² + 1)²: dy/dx = 2 * (3 * 16 + 1) * 3 * 2 * 4 * 3
        assert torch.equal(gradient(saves_twice), torch.full((4, 64), 49.0 * 144))


def test_an_evaluation_moves_nothing() -> None:
    host = Recorded()
    model = offloaded(host)
    with torch.no_grad():
        loss_of(model.train(), torch.stack(tokens(1)))
        loss_of(model.eval(), torch.stack(tokens(1)))
    loss_of(model.eval(), torch.stack(tokens(1)))[0].backward()
    assert host.diary == []


@pytest.fixture
def fresh() -> Iterator[None]:
    """With nothing compiled before or after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("recompute", [None, "full"])
def test_compiled_blocks_move_what_they_keep(recompute: Recompute | None) -> None:
    torch.manual_seed(0)
    plain = llama().train()
    blocks = HUGGING_FACE.blocks(plain)
    if recompute is not None:
        recompute_blocks(plain, blocks, recompute)
    compile_blocks(plain, blocks, required=True, backend="aot_eager")
    without = learn(plain)
    host = Recorded()
    Offload(1, 1, host).cover(plain, blocks)
    found = learn(plain)
    assert all(torch.equal(a, b) for a, b in zip(found, without, strict=True))
    assert host.diary.count("load") == host.diary.count("store") >= LAYERS - 1
    assert host.free_bytes == host.held_bytes


def test_an_heir_has_the_memory_of_its_predecessor() -> None:
    """As in a regroup: pinning takes long."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    train = small_train(recompute="full", offload=OffloadConfig(horizon=1, least_bytes=2**16))
    loop = make_loop(0, meet, prepare_shape(train), train, 1)
    former = loop.engine
    try:
        take_step(loop)
        held = former.offloaded_bytes
        former.let_go_of_model()
        leave_replica_group()
        mesh = make_replica_group(meet, "heir", rank=0, dims=train.parallel.dims, device="cpu")
        slot = former.slot
        heir = Engine(
            former.task,
            train,
            slot=slot,
            mesh=mesh,
            device="cpu",
            max_replicas=1,
            heir_of=former,
        )
        heir.take_over(former)
    finally:
        leave_replica_group()
    assert heir.offloaded_bytes == held > 0


Train = Callable[[OffloadConfig | None, int, int], list[WorkerResult]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains a Llama of four layers, its blocks recomputed; the result of every worker."""
    root = tmp_path_factory.mktemp("offload")
    text = write_text(root / "text")
    task = tiny_task(text, num_hidden_layers=LAYERS, attention_dropout=0.1)

    @functools.cache
    def train(offload: OffloadConfig | None, shard: int, replicas: int) -> list[WorkerResult]:
        config = tiny_train(text, shard=shard, task=task, steps=3, recompute=2)
        config = replace(config, offload=offload)
        prepared = task.prepare(config, str(root / "cache"))
        results = run_layout(prepared, config, replicas=replicas, lanes=2)
        assert all(isinstance(result, WorkerResult) for result in results), results
        return results

    return train


@pytest.mark.parametrize(
    ("shard", "replicas"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.soak)],
)
def test_layouts_have_the_same_bits(trained: Train, shard: int, replicas: int) -> None:
    """With dropout. Without, in all layouts: test_matrix.py."""
    plain = trained(None, shard, replicas)
    moved = trained(EVERYTHING, shard, replicas)
    for one, other in zip(plain, moved, strict=True):
        assert_same_bits(one, other)


def train_with(offload: OffloadConfig, build: Callable[[], nn.Module] = llama) -> TrainConfig:
    task = CustomTask(build_model=build, loss_function=loss_of, dataset=tokens(1))
    return TrainConfig(task=task, steps=1, global_batch=2, offload=offload)


@pytest.mark.parametrize("field", ["horizon", "least_bytes"])
def test_numbers_below_one_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.offload\.{field}"):
        OffloadConfig(**{field: 0})


@pytest.mark.parametrize(("build", "horizon"), [(llama, LAYERS), (flat, 1)])
def test_a_model_with_too_few_blocks_is_refused(
    build: Callable[[], nn.Module], horizon: int
) -> None:
    train = train_with(OffloadConfig(horizon=horizon), build)
    with pytest.raises(ConfigError, match="nothing would be offloaded"):
        build_model(train.task.prepare(train, ""), train)
