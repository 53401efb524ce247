"""Where the time of a step goes, by part.

    data            waiting for samples, and their way to the device
    compute         forward and backward, with what they wait for inside the replica
    communication   waiting for the sum over the replicas after backward
    commit          agreeing on the step, and so waiting for the slowest worker
    optimizer       the optimizer step
    save            handing over a copy of the state
    evaluation      on the held-out data
    other           what lies between: comparing the replicas, starting and writing a profile

Each moment is in one part, so they add up to the time of a step. On a CPU they are host time. On
CUDA they are time of the current stream, which events mark: the host neither waits for one nor
reads it before the commit of the next step, by when the device has passed it. Decision:
docs/decisions/042.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from trainer.loop.phases import Phase

Part = Literal[
    "data", "compute", "communication", "commit", "optimizer", "save", "evaluation", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)

_PARTS: dict[Phase, Part] = {
    "data": "data",
    "compile": "other",
    "forward": "compute",
    "backward": "compute",
    "reduce": "communication",
    "before_commit": "commit",
    "in_commit": "commit",
    "after_commit": "commit",
    "optimizer": "optimizer",
    "checkpoint": "save",
    "evaluation": "evaluation",
    "profile": "other",
}

WINDOW_STEPS = 50
"""Steps that are told of at once."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The mean of some steps that followed each other, on one worker."""

    step: int
    """The last of them."""
    steps: int
    """How many."""
    seconds: dict[Part, float]
    """Of a step, by part; they add up to its time."""


class StepClock:
    """The parts of one worker's steps in one generation. Its first step, which warms up, and its
    last one, which has no end, are left out.

    Args:
        device: where the worker computes.
    """

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._stamp: Callable[[], Any] = _cuda_event if on_cuda else time.perf_counter
        self._between: Callable[[Any, Any], float] = _cuda_seconds if on_cuda else _seconds
        self._marks: list[tuple[Part, Any]] = []
        self._whole: list[tuple[Part, Any]] = []
        """The step before, with its end."""
        self._begun = 0
        self._sums, self._steps, self._last = dict.fromkeys(PARTS, 0.0), 0, 0

    def begin(self) -> None:
        """A step begins, and the one before it ends."""
        mark: tuple[Part, Any] = "other", self._stamp()
        self._whole = [*self._marks, mark] if self._begun > 1 else []
        self._marks, self._begun = [mark], self._begun + 1

    def enter(self, phase: Phase) -> None:
        """The worker enters a phase of the step."""
        self.turn_to(_PARTS[phase])

    def turn_to(self, part: Part) -> None:
        """What the worker does from now on is of another part."""
        if self._marks and self._marks[-1][0] != part:
            self._marks.append((part, self._stamp()))

    def committed(self, step: int) -> StepTimes | None:
        """The host has waited for `step`: counts the one before it. Returns a window that is
        full."""
        for (part, begin), (_, end) in pairwise(self._whole):
            self._sums[part] += self._between(begin, end)
        if self._whole:
            self._steps, self._last, self._whole = self._steps + 1, step - 1, []
        return self.take() if self._steps == WINDOW_STEPS else None

    def take(self) -> StepTimes | None:
        """What was counted and not told of yet; None where that is nothing."""
        if not self._steps:
            return None
        means = {part: total / self._steps for part, total in self._sums.items()}
        times = StepTimes(step=self._last, steps=self._steps, seconds=means)
        self._sums, self._steps = dict.fromkeys(PARTS, 0.0), 0
        return times


def _seconds(begin: float, end: float) -> float:
    return end - begin


def _cuda_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cuda_seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3
