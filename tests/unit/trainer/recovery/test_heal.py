"""A newcomer keeps a state that has arrived, whenever it is called away, and does not wait for one
forever."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.healing import (
    commit_of,
    meeting_at,
    step_both,
    wait_until,
)
from trainer.backend.host_memory import HostMemory
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.loop.link import Progress
from trainer.loop.steps import TrainLoop
from trainer.recovery import heal
from trainer.recovery.backlog import Backlog
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source


class Clones(TorchDispatchMode):
    """Counts tensors of so many numbers that are cloned where they are."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.found = numbers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        if func is torch.ops.aten.clone.default:
            self.found += args[0].numel() == self.numbers
        return func(*args, **(kwargs or {}))


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
    with Clones(taker.gradient.numel()) as clones:
        wait_until(newcomer.finish)
    assert clones.found == 0, "the device may have no room for one"
    assert newcomer.caught_up
    assert taker.state.digest() == giver.state.digest() and taker.state.optimizer_steps == kept
    assert torch.equal(taker.gradient, in_progress)
    source.close()
    newcomer.close()


def small_backlog(engine: Engine, steps: int) -> Backlog:
    """Room for so many steps, on a host that has nothing left."""
    full = HostMemory(available_bytes=0, total_bytes=2**30)
    return Backlog(free_bytes=steps * engine.gradient.nbytes, measure=lambda: full)


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


def test_a_device_s_error_is_no_failed_heal(
    pair: tuple[Rendezvous, Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ends for it, and says so."""
    meet, _, taker = pair
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def receive(newcomer: Newcomer) -> None:
        raise error

    monkeypatch.setattr(Newcomer, "_receive_all", receive)
    monkeypatch.setattr(heal, "lasting_device_error", lambda: error, raising=False)
    newcomer = Newcomer(taker, meeting_at(meet), clip_norm=0.5)
    newcomer.close()
    assert newcomer.take_failure() is None and not newcomer.caught_up


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


def test_a_newcomer_catches_up_for_half_a_step_at_a_time_and_says_so(
    pair: tuple[Rendezvous, Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation after the last step is no part of that: its peers would wait in the sum for all
    that it lacks, and it would be taken for stuck."""
    meet, giver, taker = pair
    now, phases, during = [0.0], ["after_commit"], list[str]()
    monkeypatch.setattr(heal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    meeting, optimizer_step = meeting_at(meet), taker.optimizer.step
    source = Source(giver, 0, meeting)
    newcomer = Newcomer(taker, meeting, clip_norm=0.5)
    wait_until(lambda: newcomer.caught_up)
    for step, took_s in enumerate([1.0, 1.0, 1.0, 60.0]):
        now[0] += took_s
        step_both(giver, newcomer, taker, step)

    def takes_long(rate: float, scale: float) -> None:
        optimizer_step(rate, scale)
        now[0] += 0.4
        during.append(phases[-1])

    monkeypatch.setattr(taker.optimizer, "step", takes_long)
    loop: Any = object.__new__(TrainLoop)
    loop.progress = Progress(step=4)
    told = list[Newcomer]()
    loop.link = SimpleNamespace(
        at_step=lambda step, phase: phases.append(phase), caught_up=told.append
    )
    loop.follow(newcomer)
    assert taker.state.optimizer_steps == 2 and not told
    loop.follow(newcomer)
    assert told == [newcomer] and taker.state.digest() == giver.state.digest()
    assert during == 4 * ["heal_target"]
    loop.follow(newcomer)
    assert phases == ["after_commit", "heal_target", "heal_target"], "with nothing to make up for"
    source.close()
    newcomer.close()


@pytest.mark.parametrize("full", [False, True], ids=["while it catches up", "for want of room"])
def test_a_state_with_half_an_optimizer_step_is_none(
    pair: tuple[Rendezvous, Engine, Engine], monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """The kept steps fill the host's memory, and the optimizer needs some. If a peer is lost at
    that time, this worker joins again with what it has."""
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    source = Source(giver, 0, meeting)
    newcomer = Newcomer(
        taker, meeting, clip_norm=0.5, backlog=small_backlog(taker, 1 if full else 3)
    )
    wait_until(lambda: newcomer.caught_up)
    step_both(giver, newcomer, taker, 0)
    optimizer_step, tries = taker.optimizer.step, list[float]()

    def has_no_memory_at_first(rate: float, scale: float) -> None:
        tries.append(rate)
        optimizer_step(rate, scale)
        if len(tries) == 1:
            raise MemoryError

    monkeypatch.setattr(taker.optimizer, "step", has_no_memory_at_first)
    with pytest.raises(MemoryError):
        step_both(giver, newcomer, taker, 1)
        newcomer.catch_up()
    source.close()
    newcomer.close()
    assert tries and not newcomer.finish()
