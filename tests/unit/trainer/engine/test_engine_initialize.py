"""An engine starts from the seed as often as it must."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.parallel.layout import ParallelDims, Slot
from trainer.parallel.mesh import ReplicaMesh
from trainer.replication.lane_sums import LaneSums
from trainer.tasks.custom import CustomTask


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine of one worker."""
    task = CustomTask(
        build_model=lambda: nn.Linear(3, 2), loss_function=lambda m, b: (m(b).sum(), 1), dataset=[0]
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mesh = make_replica_group(
        Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60),
        "replica",
        rank=0,
        dims=ParallelDims(),
        device="cpu",
    )
    yield Engine(
        task,
        TrainConfig(task=task, steps=1, global_batch=1, seed=5),
        slot=Slot(replica=0, rank=0, dims=ParallelDims()),
        mesh=mesh,
        device="cpu",
        max_replicas=1,
    )
    leave_replica_group()


@pytest.mark.parametrize("arrived", [False, True])
def test_half_a_heal_leaves_no_trace(engine: Engine, arrived: bool) -> None:
    """A newcomer's source may die when part of the state, moments included, has arrived, or just
    after all of it has; where nobody else has the state, all start from the seed."""
    for tensor in engine.state.tensors().values():
        tensor.fill_(9.0)
    engine.state.optimizer_steps = 4
    if arrived:
        engine.forget_initial_weights()
    engine.initialize()
    torch.manual_seed(5)
    fresh = nn.Linear(3, 2)
    state = engine.state.tensors()
    assert torch.equal(state["param/weight"], fresh.weight.detach())
    assert torch.equal(state["param/bias"], fresh.bias.detach())
    assert not any(t.any() for name, t in state.items() if name.startswith("exp_avg"))
    assert engine.state.optimizer_steps == 0


def test_what_an_evaluation_has_gathered_is_not_used_after_a_restore(engine: Engine) -> None:
    """A run that goes back restores in a process that has just evaluated, perhaps."""
    x = torch.tensor([[1.0, 2.0, 3.0]])
    engine.initialize()
    with torch.no_grad():
        engine.model(x)
        values = {
            name: tensor + 1 if name.startswith("param/") else tensor.clone()
            for name, tensor in engine.state.tensors().items()
        }
        engine.load(values, optimizer_steps=0)
        expected = x @ values["param/weight"].T + values["param/bias"]
        assert torch.equal(engine.model(x), expected)


def test_a_gpu_has_room_for_the_lanes_that_a_replica_has_when_all_are_there(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many replicas the gradient is padded for: with successors they are twice as many.
    Where one may be lost, the host has room for a lane of its from the start."""
    assert engine.make_sums(4, 2).most is None
    reserved: list[LaneSums] = []
    monkeypatch.setattr(LaneSums, "reserve_on_host", lambda sums: reserved.append(sums))
    engine.device = torch.device("cuda")
    made = [engine.make_sums(4, replicas) for replicas in (1, 2, 4)]
    assert [sums.most for sums in made] == [3, 2, 1]
    assert reserved == made[1:]


FIRST = """
import sys
import torch.distributed as dist
from torch import nn
from elastic.worker import worker
from trainer.backend.groups import make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.parallel.apply import warm_up
from trainer.parallel.layout import ParallelDims, Slot
from trainer.tasks.custom import CustomTask

task = CustomTask(
    build_model=lambda: nn.Linear(3, 2), loss_function=lambda m, b: (m(b).sum(), 1), dataset=[0]
)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
warm_up()
before = set(sys.modules)
mesh = make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
train = TrainConfig(task=task, steps=1, global_batch=1)
slot = Slot(replica=0, rank=0, dims=ParallelDims())
Engine(task, train, slot=slot, mesh=mesh, device="cpu", max_replicas=1)
print(*sorted(name for name in set(sys.modules) - before if name.startswith("torch")))
"""


def test_a_warm_spare_has_nothing_to_import() -> None:
    """On two busy cores these imports took half of its way into a replica."""
    first = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=True
    )
    assert first.stdout.split() == []


class Masked(nn.Module):
    """Blocks that share a mask, which each has as its own."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(2, 2, dtype=torch.bool).tril()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        for block in self.blocks:
            block.register_buffer("mask", mask, persistent=False)
        self.register_buffer("scale", torch.tensor([0.5]))


def test_a_buffer_with_several_names_stays_one(replica: tuple[Rendezvous, ReplicaMesh]) -> None:
    task = CustomTask(build_model=Masked, loss_function=lambda m, b: (m(b).sum(), 1), dataset=[0])
    train = TrainConfig(task=task, steps=1, global_batch=1)
    slot = Slot(replica=0, rank=0, dims=ParallelDims())
    engine = Engine(task, train, slot=slot, mesh=replica[1], device="cpu", max_replicas=1)
    found = dict(engine.model.named_buffers(remove_duplicate=False))
    assert found["blocks.0.mask"] is found["blocks.1.mask"]
    assert found["blocks.1.mask"].tolist() == [[True, False], [True, True]]
    assert found["scale"].tolist() == [0.5]
