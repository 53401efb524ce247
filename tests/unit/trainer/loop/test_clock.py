"""The parts of a step: their sum, what is in them, and which steps are left out."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from trainer.loop import clock as clocks
from trainer.loop.clock import OwnTimes, StepClock, StepTimes
from trainer.loop.phases import STEP_PHASES

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds; a test sets it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def do_step(clock: StepClock, step: int, now: list[float], phase_s: float) -> StepTimes | None:
    """A step of two micro-batches, in which each phase takes `phase_s`, and then a save."""
    clock.begin()
    *compute, _, _, _, _, _ = STEP_PHASES
    times = None
    for phase in (*compute, *STEP_PHASES, "checkpoint"):
        if phase == "optimizer":
            times = clock.committed(step)
        clock.enter(phase)
        now[0] += phase_s
    clock.turn_to("other")
    now[0] += 0.5
    return times


def test_the_parts_are_those_of_the_phases_and_add_up_to_the_time_of_a_step(
    seconds: list[float],
) -> None:
    clock = StepClock(CPU)
    for step in range(4):
        assert do_step(clock, step, seconds, 1.0) is None
    times = clock.take()
    assert times is not None and (times.step, times.steps) == (2, 2)
    assert times.seconds == {
        "data": 2.0, "compute": 4.0, "communication": 1.0, "commit": 3.0, "optimizer": 1.0,
        "save": 1.0, "evaluation": 0.0, "other": 0.5,
    }  # fmt: skip
    assert clock.take() is None, "what was told is not told again"


def test_the_first_step_is_left_out_and_the_one_that_has_no_end(seconds: list[float]) -> None:
    clock = StepClock(CPU)
    for step, phase_s in enumerate([100.0, 1.0, 3.0, 100.0]):
        do_step(clock, step, seconds, phase_s)
    times = clock.take()
    assert times is not None and times.seconds["optimizer"] == 2.0


def test_a_step_that_is_repeated_is_another_generations(seconds: list[float]) -> None:
    clock = StepClock(CPU)
    for step in range(3):
        do_step(clock, step, seconds, 1.0)
    clock.begin()  # and a fault comes
    times = clock.take()
    assert times is not None and times.steps == 1


def test_a_window_is_told_of_when_it_is_full(seconds: list[float]) -> None:
    clock = StepClock(CPU)
    told = [do_step(clock, step, seconds, 1.0) for step in range(clocks.WINDOW_STEPS + 3)]
    full = [times for times in told if times is not None]
    assert [times.steps for times in full] == [clocks.WINDOW_STEPS]
    assert told.index(full[0]) == clocks.WINDOW_STEPS + 1  # one late, and not the first


class Late:
    """A CUDA event that the device has passed only when the host has waited for it."""

    passed = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def elapsed_time(self, end: Late) -> float:
        assert self.number <= end.number <= Late.passed, "it would raise: the device is not there"
        return 1000.0 * (end.number - self.number)


def test_on_a_gpu_events_are_read_when_the_host_has_waited_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What CUDA does with events is tested where there is a GPU."""
    events: list[Late] = []

    def record() -> Late:
        events.append(Late(len(events)))
        return events[-1]

    monkeypatch.setattr(clocks, "timed_mark", record)
    clock = StepClock(torch.device("cuda"))
    times: Any = None
    for step in range(4):
        clock.begin()
        clock.enter("forward")
        clock.enter("in_commit")
        Late.passed = len(events) - 1  # the commit's numbers are there
        clock.committed(step)
        clock.enter("optimizer")
    times = clock.take()
    assert times.seconds["compute"] == times.seconds["commit"] == times.seconds["optimizer"] == 1.0


def test_a_worker_s_own_time_is_that_of_its_thread_and_of_one_step(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute counts while the thread is awake; here a quarter of the time."""
    monkeypatch.setattr(clocks, "AwakeTime", lambda: Quarter(seconds))
    clock = StepClock(CPU)
    found = []
    for step, phase_s in enumerate([9.0, 1.0, 2.0, 1.0]):
        do_step(clock, step, seconds, phase_s)
        clock.took(100, 0.5)
        clock.took(60, 0.25)
        found.append(clock.take_own())
    clock.close()
    assert found[:2] == [None, None], "the first step, and one that has no end yet"
    # Of the second step: two micro-batches, forward and backward each.
    assert found[2] == OwnTimes(
        step_s=12.5,
        micro_batches=2,
        tokens=160,
        data_s=2.0,
        read_s=0.75,
        compute_s=4.0 / 4,
        optimizer_s=1.0,
    )
    assert found[3] is not None and (found[3].step_s, found[3].compute_s) == (24.5, 2.0)
    assert clock.take_own() is None


class Quarter:
    """Of the time that passes."""

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now[0] / 4

    def close(self) -> None:
        pass
