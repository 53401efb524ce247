"""Model converters that are added from outside the package."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.engine.build import build_model
from trainer.engine.engine import Engine
from trainer.engine.state import state_table
from trainer.errors import ConfigError
from trainer.models.converter import ModelConverter
from trainer.models.init import FullWeights, WeightSource
from trainer.parallel.layout import ParallelDims, Slot
from trainer.parallel.mesh import ReplicaMesh
from trainer.tasks.custom import CustomTask


@dataclass(frozen=True)
class Freeze:
    """Freezes the parameters whose names begin with `prefix`."""

    prefix: str

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        for name, param in model.named_parameters():
            param.requires_grad_(param.requires_grad and not name.startswith(self.prefix))
        return model, source


class Recomputed(nn.Module):
    """A block whose activations are made again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Renamed:
    """Reads the weights of wrapped blocks under their old names."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    def read(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        return self.source.read(name.replace("block.", ""), shape, offsets, sizes)


class Recompute:
    """Activation checkpointing round each block; the names of the parameters change."""

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        for name, block in list(model.named_children()):
            setattr(model, name, Recomputed(block))
        return model, Renamed(source)


class Adapter:
    """Adds a parameter of its own, with its own initial value."""

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        model.register_parameter("extra", nn.Parameter(torch.empty(2, device="meta")))
        own = FullWeights({"extra": torch.full((2,), 7.0)})

        class Both:
            def read(self, name: str, *box: tuple[int, ...]) -> torch.Tensor:
                return (own if name == "extra" else source).read(name, *box)

        return model, Both()


TASK = CustomTask(
    build_model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
    loss_function=lambda model, batch: (model(batch).square().sum(), 1),
    dataset=[0],
)


@pytest.fixture
def group() -> Iterator[ReplicaMesh]:
    """A replica of one worker."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    yield make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
    leave_replica_group()


def trained(mesh: ReplicaMesh, *converters: ModelConverter) -> dict[str, torch.Tensor]:
    """The state after two steps."""
    train = TrainConfig(task=TASK, steps=2, global_batch=1, seed=5, converters=converters)
    engine = Engine(
        TASK,
        train,
        slot=Slot(replica=0, rank=0, dims=ParallelDims()),
        mesh=mesh,
        device="cpu",
        max_replicas=1,
    )
    engine.initialize()
    batch = torch.ones(4, 3)
    for step in range(2):
        engine.collect_in(engine.gradient)
        engine.backward_at_last(TASK.loss(engine.model, batch)[0], lambda _: None)
        engine.apply(step, scale=1.0)
    return {name: tensor.clone() for name, tensor in engine.state.tensors().items()}


def test_recomputed_blocks_learn_the_same_bits(group: ReplicaMesh) -> None:
    plain, wrapped = trained(group), trained(group, Recompute())
    assert {name.replace("block.", "") for name in wrapped} == set(plain)
    for name, tensor in wrapped.items():
        assert "block." in name
        assert torch.equal(tensor, plain[name.replace("block.", "")])


def test_frozen_parameters_stay_and_have_no_moments(group: ReplicaMesh) -> None:
    state = trained(group, Freeze("0."))
    source = TASK.build(5)[1]
    assert torch.equal(state["param/0.weight"], source.read("0.weight", (3, 3), (0, 0), (3, 3)))
    assert not torch.equal(state["param/1.weight"], source.read("1.weight", (2, 3), (0, 0), (2, 3)))
    assert "exp_avg/0.weight" not in state and "exp_avg/1.weight" in state


def test_a_converter_brings_the_values_of_its_own_parameters(group: ReplicaMesh) -> None:
    state = trained(group, Adapter())
    assert torch.equal(state["param/extra"], torch.full((2,), 7.0))


def test_the_driver_knows_the_converted_state() -> None:
    train = TrainConfig(task=TASK, steps=1, global_batch=1, converters=(Freeze("0."), Recompute()))
    table = state_table(build_model(TASK, train)[0], train.optimizer)
    assert "param/0.block.weight" in table and "exp_avg/1.block.weight" in table
    assert "exp_avg/0.block.weight" not in table
    assert pickle.loads(pickle.dumps(Freeze("0."))) == Freeze("0.")


def test_converters_that_freeze_all_are_refused() -> None:
    train = TrainConfig(task=TASK, steps=1, global_batch=1, converters=(Freeze(""),))
    with pytest.raises(ConfigError, match="no trainable parameters"):
        build_model(TASK, train)


class Scaled:
    """Adds a number without dimensions, as CLIP has."""

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.6, device="meta")))
        return model, source


def test_a_parameter_that_cannot_be_cut_is_refused() -> None:
    train = TrainConfig(task=TASK, steps=1, global_batch=1, converters=(Scaled(),))
    with pytest.raises(ConfigError, match=r"parameter logit_scale.*shape \(1,\)"):
        build_model(TASK, train)
