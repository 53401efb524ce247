"""A save's copy is made beside the next step, and whatever changes the state waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from typing import Any

import pytest
import torch

from elastic import TrainConfig
from elastic.protocol.faults import flip_bit
from tests.support.member import small_task, small_train
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.engine.host_copy import HostBuffer, Share
from trainer.engine.shared_copy import open_copy
from trainer.parallel.layout import ParallelDims, Slot
from trainer.parallel.mesh import ReplicaMesh
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_wire import Meeting

DEADLINE_S, A_WHILE_S = 30.0, 0.3

TRAIN: TrainConfig = small_train(4)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies to a buffer are not made before it is set."""
    opened, copy = threading.Event(), torch._foreach_copy_

    def gated(*arguments: Any) -> None:
        if threading.current_thread().name.startswith("save copy"):
            assert opened.wait(DEADLINE_S)
        copy(*arguments)

    monkeypatch.setattr(torch, "_foreach_copy_", gated)
    yield opened
    opened.set()


def make_engine(mesh: ReplicaMesh) -> Engine:
    slot = Slot(replica=0, rank=0, dims=ParallelDims())
    engine = Engine(small_task(), TRAIN, slot=slot, mesh=mesh, device="cpu", max_replicas=1)
    engine.initialize()
    engine.gradient.fill_(0.1)
    engine.apply(0, scale=1.0)
    return engine


def apply(engine: Engine, meet: Rendezvous) -> None:
    engine.apply(1, scale=1.0)


def start_anew(engine: Engine, meet: Rendezvous) -> None:
    engine._source = None
    engine.initialize()


def load(engine: Engine, meet: Rendezvous) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in engine.state.tensors().items()}
    engine.load(zeros, optimizer_steps=0)


def flip(engine: Engine, meet: Rendezvous) -> None:
    flip_bit(engine)


def be_healed(engine: Engine, meet: Rendezvous) -> None:
    meeting = Meeting(rendezvous=meet, prefix="heal", secret=b"of the run")
    newcomer = Newcomer(engine, meeting, clip_norm=1.0)
    for tensor in engine.state.tensors().values():
        tensor.zero_()  # as what it receives does
    newcomer.close()


@pytest.mark.parametrize("change", [apply, start_anew, load, flip, be_healed])
def test_a_change_waits_for_the_copy(
    replica: tuple[Rendezvous, ReplicaMesh],
    gate: threading.Event,
    change: Callable[[Engine, Rendezvous], None],
) -> None:
    meet, mesh = replica
    engine = make_engine(mesh)
    engine.gradient.fill_(0.3)
    saved = {name: tensor.clone() for name, tensor in engine.state.tensors().items()}
    share = engine.state.share(0, 1)
    buffer = HostBuffer(share.size_bytes, engine.device)
    with ThreadPoolExecutor(1) as pool:
        copy = engine.state.copy_to(buffer, share)
        changed = pool.submit(change, engine, meet)
        with pytest.raises(NotYetError):
            changed.result(A_WHILE_S)
        gate.set()
        changed.result(DEADLINE_S)
    copy.wait()
    with open_copy(os.getpid(), buffer.fd, buffer.number) as memory:
        for part, place in zip(share.slices, share.places, strict=True):
            expected = saved[part.name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert bytes(memory[place : place + len(expected)]) == expected, part.name
    now = engine.state.tensors()
    assert any(not torch.equal(now[name], saved[name]) for name in saved)
    buffer.close()


def test_the_copy_holds_up_only_who_changes_the_state(
    replica: tuple[Rendezvous, ReplicaMesh], gate: threading.Event
) -> None:
    engine = make_engine(replica[1])
    share = engine.state.share(0, 1)
    buffer = HostBuffer(share.size_bytes, engine.device)
    copy = engine.state.copy_to(buffer, share)  # returns at once
    assert copy.held_s == 0
    threading.Timer(A_WHILE_S, gate.set).start()
    engine.state.await_copy()
    assert copy.held_s > A_WHILE_S / 2
    buffer.close()


def test_a_worker_that_has_nothing_of_a_small_model_copies_nothing() -> None:
    share = Share([])
    buffer = HostBuffer(share.size_bytes, torch.device("cpu"))
    buffer.copy(share).wait()
    buffer.close()
