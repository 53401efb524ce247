"""The checksum of a worker's state: any bit counts, and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from elastic.protocol.faults import flip_bit
from tests.support.data_plane import make_engine
from tests.support.measured_peak import peak_of
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OptimizerConfig, TrainConfig
from trainer.engine.engine import Engine
from trainer.tasks.custom import CustomTask

Make = Callable[[nn.Module, str], Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes the engine of a model, with parameters and moments of a type."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)

    def engine_of(model: nn.Module, dtype: str) -> Engine:
        task = CustomTask(
            build_model=lambda: model, loss_function=lambda m, b: (m(b).sum(), 1), dataset=[0]
        )
        narrow = OptimizerConfig(master_dtype=dtype, moment_dtype=dtype)  # type: ignore[arg-type]
        train = TrainConfig(task=task, steps=1, global_batch=1, optimizer=narrow)
        return make_engine(0, meet, task, train)

    yield engine_of
    leave_replica_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_of_the_state_counts(make: Make, dtype: str) -> None:
    """In bfloat16 the weights are eighteen bytes, and the bias is six."""
    state = make(nn.Linear(3, 3), dtype).state
    checksum, seen = state.checksum(), 0
    for name, tensor in state.tensors().items():
        for byte in tensor.view(-1).view(torch.uint8):
            for bit in range(8):
                byte ^= 1 << bit
                assert state.checksum() != checksum, name
                byte ^= 1 << bit
                seen += 1
    assert state.checksum() == checksum
    assert seen == 3 * 12 * 8 * (2 if dtype == "bfloat16" else 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_takes_no_memory(make: Make, dtype: str) -> None:
    """At each comparison, on a GPU that is full."""
    state = make(nn.Linear(512, 512), dtype).state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state.checksum()
    assert (
        0
        < peak_of(profiler)
        < 10_000
        < min(t.nbytes for name, t in state.tensors().items() if name.endswith("weight"))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bit_that_a_fault_flips_leaves_a_number_like_it(make: Make, dtype: str) -> None:
    engine = make(nn.Linear(3, 3), dtype)
    weights, checksum = engine.state.tensors()["param/weight"], engine.state.checksum()
    before = weights.clone()
    flip_bit(engine)
    assert engine.state.checksum() != checksum
    changed = (weights - before).abs() / before.abs()
    assert changed.count_nonzero() == 1 and changed.max() <= 2**-3
    flip_bit(engine)
    assert torch.equal(weights, before)


def test_that_of_a_worker_without_numbers_is_a_number_too(make: Make) -> None:
    """As where more workers share a small model than it has rows."""
    assert make(nn.Linear(3, 0), "float32").state.checksum() == 0
