"""FSDP2 puts a lane's gradients where the lane wants them, or they are copied there; either way
they are what autograd gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.compiled_sums import record_sums
from tests.support.data_plane import make_engine
from tests.support.measured_peak import taken
from tests.support.tiny import tiny_train, write_text
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.engine import flat_layout
from trainer.engine.engine import Engine
from trainer.loop.compile_ahead import compile_ahead
from trainer.parallel import backward, lone_gradients, wide_sums
from trainer.parallel.apply import local_tensor
from trainer.parallel.param_group import param_group
from trainer.tasks.custom import CustomTask


class Block(nn.Module):
    """A parameter of its own beside a module's: FSDP2 takes the module's first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 3)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, uses_spare: bool) -> torch.Tensor:
        x = torch.tanh(self.linear(x)) * self.scale
        return x + self.spare if uses_spare else x


class Model(nn.Module):
    """Two blocks between parameters of its own; `visits` are the blocks in the order of calls."""

    def __init__(self, visits: tuple[int, ...], uses_spare: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.embedding = nn.Linear(5, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.visits, self.uses_spare = visits, uses_spare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.shift
        for index in self.visits:
            x = self.blocks[index](x, self.uses_spare)
        return x


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), len(batch)


MODELS: dict[str, Callable[[], Model]] = {
    "all": lambda: Model((0, 1), uses_spare=True),
    "unused parameters": lambda: Model((0, 1), uses_spare=False),
    "unused block": lambda: Model((1,), uses_spare=True),
    "block twice": lambda: Model((0, 1, 0), uses_spare=True),
}


def task_of(kind: str, narrow: bool = False) -> tuple[CustomTask, TrainConfig]:
    """`narrow`: parameters are bfloat16, gradients float32 nevertheless."""
    task = CustomTask(build_model=MODELS[kind], loss_function=loss_of, dataset=[0])
    optimizer = OptimizerConfig(master_dtype="bfloat16" if narrow else "float32")
    return task, TrainConfig(task=task, steps=1, global_batch=1, seed=0, optimizer=optimizer)


def meet(port: int) -> Rendezvous:
    return Rendezvous(host="127.0.0.1", port=port, timeout_s=60)


def lane(engine: Engine, flat: torch.Tensor, batches: list[torch.Tensor]) -> list[bool]:
    """Computes a lane into `flat`.

    Returns:
        Of each parameter with a gradient, in the layout's order: whether the first micro-batch put
        it where it belongs.
    """
    engine.collect_in(flat)
    for batch in batches[:-1]:
        engine.backward(engine.task.loss(engine.model, batch)[0])
    in_place = [
        local_tensor(param.grad).data_ptr() == view.data_ptr()
        for param, view in zip(engine.layout.params, engine.layout.views(flat), strict=True)
        if param.grad is not None and view.numel()
    ]
    told: list[int] = []
    engine.backward_at_last(engine.task.loss(engine.model, batches[-1])[0], told.append)
    assert told == sorted(told) and told[-1] == engine.layout.count
    assert all(param.grad is None for param in engine.layout.params)
    return in_place


def expected(
    make: Callable[[], nn.Module], batches: list[torch.Tensor], narrow: bool = False
) -> dict[str, torch.Tensor]:
    """The gradients that autograd gives without FSDP, in float32 throughout."""
    torch.manual_seed(0)
    model = make()
    if narrow:
        model = model.bfloat16().float()
    for batch in batches:
        loss_of(model, batch)[0].backward()
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
    }


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_lane_holds_what_autograd_gives(kind: str, narrow: bool, port: int) -> None:
    """Two lanes of three micro-batches, in buffers with rubbish in them; the second lane leaves the
    first one's alone."""
    engine = make_engine(0, meet(port), *task_of(kind, narrow))
    draw = torch.Generator().manual_seed(1)
    lanes = [[torch.randn(4, 5, generator=draw) for _ in range(3)] for _ in range(2)]
    flats = [torch.full((engine.layout.count + 7,), 9.0) for _ in lanes]
    for flat, batches in zip(flats, lanes, strict=True):
        in_place = lane(engine, flat, batches)
        assert all(in_place) or kind == "unused parameters"
        assert any(in_place) and len(in_place) > 4
    for flat, batches in zip(flats, lanes, strict=True):
        gradients = dict(zip(engine.layout.names, engine.layout.views(flat), strict=True))
        for name, value in expected(MODELS[kind], batches, narrow).items():
            message = f"{name}: {{}}".format
            torch.testing.assert_close(gradients[name], value, msg=message)
        assert (flat[engine.layout.count :] == 9.0).all()


def memory_of_its_own(
    self: Any, size: tuple[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What FSDP2 takes by itself, for an input as for an output."""
    return torch.empty(size, dtype=dtype, device=device)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_where_a_gradient_lies_changes_no_bit(
    kind: str, narrow: bool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, and FSDP2's own way in memory of its own."""
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 5, generator=draw) for _ in range(3)]

    def computed(rubbish: float) -> tuple[torch.Tensor, list[bool]]:
        engine = make_engine(0, meet(port), *task_of(kind, narrow))
        flat = torch.full((engine.layout.count,), rubbish)
        in_place = lane(engine, flat, batches)
        leave_replica_group()
        return flat, in_place

    ours, in_place = computed(9.0)
    assert any(in_place)
    monkeypatch.setattr(backward._GroupMemory, "allocate", memory_of_its_own)
    monkeypatch.setattr(backward, "add_in_place", lambda *_: None)
    theirs, in_place = computed(8.0)
    assert not any(in_place)
    assert torch.equal(ours, theirs)


class Large(nn.Module):
    """A block with 4 MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1024, 1024, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def test_over_one_rank_a_later_gradient_is_added_as_it_comes(port: int) -> None:
    """There is memory for what autograd gives, and no other."""
    task = CustomTask(build_model=Large, loss_function=loss_of, dataset=[0])
    engine = make_engine(0, meet(port), task, replace(task_of("all")[1], task=task))
    engine.collect_in(torch.empty(engine.layout.count))
    buffers = []
    for _ in range(3):
        loss, _ = engine.task.loss(engine.model, torch.ones(1, 1024))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            engine.backward(loss)
        buffers.append(taken(profiler, 4 * engine.layout.count))
    assert buffers == [1, 1, 1]


def test_a_compiled_run_adds_by_a_kernel_of_its_own(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and the third micro-batch's, with the bits that they would have without."""
    task = CustomTask(build_model=Large, loss_function=loss_of, dataset=[0])
    train = replace(task_of("all")[1], task=task, precision="bfloat16", compile="require")
    batches = [torch.randn(1, 1024) for _ in range(3)]
    added = record_sums(monkeypatch)

    def computed() -> torch.Tensor:
        engine = make_engine(0, meet(port), task, train)
        added.clear()
        flat = torch.empty(engine.layout.count)
        lane(engine, flat, batches)
        leave_replica_group()
        return flat

    compiled = computed()
    assert added == [1024 * 1024] * 2
    monkeypatch.setattr(wide_sums, "_is_worth_it", lambda *_: False)
    plain = computed()
    assert not added
    assert torch.equal(compiled, plain)


@pytest.mark.parametrize("names", ["OF_GROUP", "OF_PARAM"])
def test_without_a_name_of_fsdp2_gradients_are_left_to_it(
    names: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This torch has them all: else this fails, and each gradient is copied again."""
    group = param_group(make_engine(0, meet(port), *task_of("all")).model)
    assert "post_backward" in vars(group)
    leave_replica_group()
    monkeypatch.setattr(lone_gradients, names, ("gone",))
    group = param_group(make_engine(0, meet(port), *task_of("all")).model)
    assert "post_backward" not in vars(group)


class Roundings(TorchDispatchMode):
    """Counts what makes bfloat16 numbers of at least so many float32 ones."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.count = least, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.count += self._any(torch.float32, args) and self._any(torch.bfloat16, found)
        return found

    def _any(self, dtype: torch.dtype, tree: Any) -> bool:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return any(t.dtype == dtype and t.numel() >= self.least for t in tensors)


def test_narrow_gradients_are_rounded_nowhere(port: int) -> None:
    """Between what autograd gives and the sum: no other number format has a part."""
    task = CustomTask(build_model=Large, loss_function=loss_of, dataset=[0])
    train = replace(task_of("all", narrow=True)[1], task=task, precision="bfloat16")
    engine = make_engine(0, meet(port), task, train)
    engine.collect_in(torch.empty(engine.layout.count))
    for _ in range(2):
        loss, _ = engine.task.loss(engine.model, torch.ones(1, 1024))
        with Roundings(engine.layout.count) as roundings:
            engine.backward(loss)
        assert roundings.count == 0
    with Roundings(engine.layout.count) as roundings:
        torch.ones(engine.layout.count).bfloat16()
    assert roundings.count == 1


def test_torch_refuses_gradients_that_were_rounded(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a later FSDP2 might be, which goes by something else."""
    monkeypatch.setattr(backward, "param_group", lambda module: None)
    engine = make_engine(0, meet(port), *task_of("all", narrow=True))
    with pytest.raises(RuntimeError, match="grad_dtype"):
        lane(engine, torch.zeros(engine.layout.count), [torch.ones(4, 5)])


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_what_compiles_ahead_of_the_first_lane_leaves_no_trace(
    narrow: bool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no lane to put its gradients in, and takes no memory for them: a step of one lane has
    one gradient, and they are put where that will be."""
    draw = torch.Generator().manual_seed(1)
    samples = list(torch.randn(4, 5, generator=draw))
    task, train = task_of("all", narrow)
    task = replace(task, dataset=samples)
    engine = make_engine(0, meet(port), task, train)
    backward, put = engine.backward, list[bool]()

    def look(loss: torch.Tensor) -> None:
        backward(loss)
        views = engine.layout.views(engine.gradient)
        for param, view in zip(engine.layout.params, views, strict=True):
            assert param.grad is not None
            put.append(local_tensor(param.grad).data_ptr() == view.data_ptr())

    monkeypatch.setattr(engine, "backward", look)
    compile_ahead(engine, 1)
    monkeypatch.undo()
    assert put and all(put)
    assert not engine.gradient.any()
    engine.initialize()
    flat, batches = torch.full((engine.layout.count,), 9.0), [torch.stack(samples)]
    lane(engine, flat, batches)
    gradients = dict(zip(engine.layout.names, engine.layout.views(flat), strict=True))
    for name, value in expected(MODELS["all"], batches, narrow).items():
        torch.testing.assert_close(gradients[name], value)


def put_in_place(rank: int, port: int, directory: Path) -> None:
    """Every rank of 3 x 2. The slices are not equal: 32 rows are 11, 11 and 10."""
    torch.set_num_threads(1)
    train = tiny_train(directory / "text", shard=3, tensor=2, global_batch=6)
    task = train.task.prepare(train, str(directory / "cache"))
    engine = make_engine(rank, meet(port), task, train)
    batch = task.train_data().batch(np.arange(2))
    for rubbish in (9.0, 8.0):
        flat = torch.full((engine.layout.count,), rubbish)
        assert all(lane(engine, flat, [batch, batch]))
        room = sum(view.numel() for view in engine.layout.views(flat))
        assert flat.count_nonzero() <= room <= engine.layout.count
    counts = torch.zeros(6, dtype=torch.int64)
    counts[rank] = engine.layout.count
    dist.all_reduce(counts)
    assert len(set(counts.tolist())) == 1
    leave_replica_group()


def test_sharded_gradients_are_in_place_on_every_rank(tmp_path: Path, port: int) -> None:
    train = tiny_train(write_text(tmp_path / "text"), shard=3, tensor=2, global_batch=6)
    train.task.prepare(train, str(tmp_path / "cache"))
    mp.start_processes(put_in_place, args=(port, tmp_path), nprocs=6, start_method="forkserver")


class Either(nn.Module):
    """Two of one size, of which a batch uses one, by its sign."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, rows, bias=False), nn.Linear(5, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if x[0, 0] > 0 else self.second(x)


Signs = tuple[tuple[float, ...], tuple[float, ...]]
"""Of the batches of either rank."""


def use_either(rank: int, port: int, rows: int, signs: Signs, narrow: bool, old: bool) -> None:
    """One of two ranks.

    Args:
        rank: it.
        port: where they meet.
        rows: of each parameter.
        signs: of all batches.
        narrow: see `task_of`.
        old: whether torch is as it was before 2.13.
    """
    torch.set_num_threads(1)
    if old:
        del FSDPModule.set_reduce_scatter_unused_params
    make = functools.partial(Either, rows)
    task = CustomTask(build_model=make, loss_function=loss_of, dataset=[0])
    train = replace(
        task_of("all", narrow)[1], task=task, global_batch=2, parallel=ParallelConfig(shard=2)
    )
    engine = make_engine(rank, meet(port), task, train)
    batches = [[torch.full((3, 5), sign * (at + 1)) for at, sign in enumerate(s)] for s in signs]
    flat = torch.zeros(engine.layout.count)
    assert all(lane(engine, flat, batches[rank]))
    views = dict(zip(engine.layout.names, engine.layout.views(flat), strict=True))
    for name, value in expected(make, [*batches[0], *batches[1]], narrow).items():
        part = torch.chunk(value, 2)[rank] if rank == 0 or rows > 1 else value[:0]
        torch.testing.assert_close(views[name], part)
    assert flat.count_nonzero() == sum(int(view.count_nonzero()) for view in views.values())
    leave_replica_group()


@pytest.mark.parametrize(
    ("rows", "signs", "narrow"),
    [
        (3, ((1.0,), (-1.0,)), False),
        (3, ((1.0, -1.0), (-1.0, -1.0)), True),
        (1, ((1.0, -1.0), (-1.0, 1.0)), False),
        (1, ((1.0,), (1.0,)), True),
    ],
)
def test_ranks_may_use_different_parameters_of_a_group(
    port: int, rows: int, signs: Signs, narrow: bool
) -> None:
    """Three rows are two and one, with room for two; of one row rank 1 has only the room, in which
    no rubbish may be."""
    mp.start_processes(
        use_either, args=(port, rows, signs, narrow, False), nprocs=2, start_method="forkserver"
    )


def test_an_older_torch_would_add_up_different_parameters_and_is_told_of(port: int) -> None:
    with pytest.raises(mp.ProcessRaisedException, match=r"Use torch 2\.13 or newer"):
        mp.start_processes(
            use_either,
            args=(port, 3, ((1.0,), (-1.0,)), False, True),
            nprocs=2,
            start_method="forkserver",
        )


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_gradients_in_another_order_are_not_taken(
    port: int, narrow: bool, monkeypatch: Any
) -> None:
    """As a later torch might lay them out: copied within one memory they would be wrong."""
    groups = backward.groups_in_backward_order
    monkeypatch.setattr(
        flat_layout, "groups_in_backward_order", lambda model: [g[::-1] for g in groups(model)]
    )
    engine = make_engine(0, meet(port), *task_of("all", narrow))
    with pytest.raises(AssertionError, match="another order"):
        lane(engine, torch.zeros(engine.layout.count), [torch.ones(4, 5)])
