"""A newcomer keeps a state that has arrived, whenever it is called away, and does not wait for one
forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.host_memory import HostMemory
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OptimizerConfig, TrainConfig
from trainer.engine.engine import Engine
from trainer.parallel.layout import ParallelDims, Slot
from trainer.recovery.backlog import Backlog
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import Meeting
from trainer.replication.step_commit import Commit
from trainer.tasks.custom import CustomTask

DEADLINE_S = 30.0
SECRET = b"of the run"


@pytest.fixture
def pair() -> Iterator[tuple[Rendezvous, Engine, Engine]]:
    """Where they meet, a worker's engine with state and another one's without, in one process."""
    task = CustomTask(
        build_model=lambda: nn.Linear(3, 2), loss_function=lambda m, b: (m(b).sum(), 1), dataset=[0]
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    mesh = make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
    settings = TrainConfig(
        task=task, steps=9, global_batch=1, seed=5, optimizer=OptimizerConfig(lr=0.1, clip_norm=0.5)
    )
    slot = Slot(replica=0, rank=0, dims=ParallelDims())
    with_state, without = (
        Engine(task, settings, slot=slot, mesh=mesh, device="cpu", max_replicas=1) for _ in range(2)
    )
    with_state.initialize()
    yield meet, with_state, without
    leave_replica_group()


def meeting_at(meet: Rendezvous, prefix: str = "heal") -> Meeting:
    """Of a source and one newcomer."""
    return Meeting(rendezvous=meet, prefix=prefix, secret=SECRET)


def commit_of(step: int) -> Commit:
    return Commit(step=step, loss=1.0, grad_norm=2.0, tokens=4, digests=b"", boundary=False)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_kept_steps_are_applied_and_the_gradient_stays(
    pair: tuple[Rendezvous, Engine, Engine], kept: int
) -> None:
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    source = Source(giver, 0, meeting)
    newcomer = Newcomer(taker, meeting, clip_norm=0.5)
    source.await_copy()
    for step in range(kept):
        for engine in (giver, taker):
            engine.gradient.fill_(step + 1.0)
        giver.apply(step, scale=commit_of(step).scale(0.5))
        newcomer.keep(commit_of(step))
    in_progress = torch.arange(float(taker.gradient.numel()))
    taker.gradient.copy_(in_progress)
    wait_until(newcomer.finish)
    assert newcomer.caught_up
    assert taker.state.digest() == giver.state.digest() and taker.state.optimizer_steps == kept
    assert torch.equal(taker.gradient, in_progress)
    source.close()
    newcomer.close()


def small_backlog(engine: Engine, steps: int) -> Backlog:
    """Room for so many steps, on a host that has nothing left."""
    full = HostMemory(available_bytes=0, total_bytes=2**30)
    return Backlog(free_bytes=steps * engine.gradient.nbytes, measure=lambda: full)


def step_both(giver: Engine, newcomer: Newcomer, taker: Engine, step: int) -> None:
    """A committed step: applied by one, kept by the other."""
    for engine in (giver, taker):
        engine.gradient.fill_(step + 1.0)
    giver.apply(step, scale=commit_of(step).scale(0.5))
    newcomer.keep(commit_of(step))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_state_that_comes_too_slowly_is_a_failed_heal(
    pair: tuple[Rendezvous, Engine, Engine],
) -> None:
    """The source is not there yet when the backlog is full. The next heal of the same engine, as
    the next generation begins it, starts from nothing."""
    meet, giver, taker = pair
    before = taker.state.digest()
    newcomer = Newcomer(
        taker, meeting_at(meet, "first"), clip_norm=0.5, backlog=small_backlog(taker, 2)
    )
    for step in range(2):
        step_both(giver, newcomer, taker, step)
    assert newcomer.take_failure() is None
    step_both(giver, newcomer, taker, 2)
    step_both(giver, newcomer, taker, 3)
    reason = newcomer.take_failure()
    assert reason is not None
    for part in (f"0 of {newcomer.bytes} bytes", "2 steps", "256.0 MiB stay free", "more memory"):
        assert part in reason
    assert newcomer.steps_behind == 2
    newcomer.close()
    wait_until(lambda: "heal-target" not in {thread.name for thread in threading.enumerate()})
    assert newcomer.take_failure() is None, "the thread that was stopped has nothing to add"
    assert not newcomer.finish() and not newcomer.caught_up
    assert taker.state.digest() == before

    meeting = meeting_at(meet, "second")
    source = Source(giver, 0, meeting)
    newcomer = Newcomer(taker, meeting, clip_norm=0.5, backlog=small_backlog(taker, 2))
    source.await_copy()
    step_both(giver, newcomer, taker, 4)
    wait_until(newcomer.finish)
    assert taker.state.digest() == giver.state.digest() and taker.state.optimizer_steps == 5
    source.close()
    newcomer.close()


def test_a_full_backlog_is_worked_off_once_the_state_is_there(
    pair: tuple[Rendezvous, Engine, Engine],
) -> None:
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    source = Source(giver, 0, meeting)
    newcomer = Newcomer(taker, meeting, clip_norm=0.5, backlog=small_backlog(taker, 2))
    wait_until(lambda: newcomer.caught_up)
    for step in range(5):
        step_both(giver, newcomer, taker, step)
    assert newcomer.take_failure() is None
    assert newcomer.steps_behind == 2 and taker.state.optimizer_steps == 3
    assert newcomer.finish() and taker.state.digest() == giver.state.digest()
    source.close()
    newcomer.close()
