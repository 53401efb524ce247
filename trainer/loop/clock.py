"""Where the time of a step goes, by part.

    data            waiting for samples, and their way to the device
    compute         forward and backward, with what they wait for inside the replica
    communication   waiting for the sum over the replicas after backward
    commit          agreeing on the step, and so waiting for the slowest worker
    optimizer       the optimizer step
    save            handing over a copy of the state, and waiting for it before the optimizer step
    evaluation      on the held-out data
    other           what lies between: comparing the replicas, starting and writing a profile

Each moment is in one part, so they add up to the time of a step. On a CPU they are host time. On
CUDA they are time of the current stream, which events mark: the host neither waits for one nor
reads it before the commit of the next step, by when the device has passed it. Decision:
docs/decisions/042.

A worker's own time is that of data, compute and optimizer, without what it waits for others: on a
CPU, compute counts while its thread is awake (`awake.py`). On CUDA the stream does not tell the two
apart: where a replica has several workers, compute is what a block takes between the waits
(`trainer/parallel/block_time.py`). Decision: docs/decisions/050.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch

from trainer.backend.awake import AwakeTime
from trainer.loop.phases import Phase
from trainer.parallel.block_time import BlockTimes, Span
from trainer.streams import timed_mark

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


@dataclass(frozen=True, kw_only=True)
class OwnTimes:
    """What one step took of one worker itself, in seconds."""

    step_s: float
    """The whole step, with what it waited for others."""
    micro_batches: int
    """Micro-batches that it computed."""
    tokens: int
    """Tokens, or whatever the task counts, of these."""
    data_s: float
    """Waiting for samples."""
    read_s: float
    """Reading these, on another thread."""
    compute_s: float
    """Forward and backward."""
    optimizer_s: float
    """The optimizer step."""


class _Mark(NamedTuple):
    """From here on the worker's time is of `part`."""

    part: Part
    stamp: Any
    awake_s: float
    """Read where compute begins or ends."""


@dataclass(kw_only=True)
class _Step:
    """One step as it goes on."""

    marks: list[_Mark]
    micro_batches: int = 0
    tokens: int = 0
    read_s: float = 0.0
    blocks: list[Span] = field(default_factory=list)
    """Of `BlockTimes`."""


class StepClock:
    """The parts of one worker's steps in one generation. Its first step, which warms up, and its
    last one, which has no end, are left out.

    Args:
        device: where the worker computes.
        blocks: how long a block takes there, where the stream alone does not tell.
    """

    def __init__(self, device: torch.device, blocks: BlockTimes | None = None) -> None:
        self._on_cuda = device.type == "cuda"
        self._blocks = blocks
        self._stamp: Callable[[], Any] = timed_mark if self._on_cuda else time.perf_counter
        self._between: Callable[[Any, Any], float] = _cuda_seconds if self._on_cuda else _seconds
        self._awake: AwakeTime | None = None
        self._step = _Step(marks=[])
        self._whole: _Step | None = None
        """The step before, with its end."""
        self._begun = 0
        self._own: OwnTimes | None = None
        self._sums, self._steps, self._last = dict.fromkeys(PARTS, 0.0), 0, 0

    def begin(self) -> None:
        """A step begins, and the one before it ends."""
        if self._awake is None and not self._on_cuda:
            self._awake = AwakeTime()
        mark = self._mark("other", compute=False)
        self._step.marks.append(mark)
        if self._blocks is not None:
            self._step.blocks = self._blocks.take()
        self._whole = self._step if self._begun > 1 else None
        self._step, self._begun = _Step(marks=[mark]), self._begun + 1

    def enter(self, phase: Phase) -> None:
        """The worker enters a phase of the step."""
        self.turn_to(_PARTS[phase])

    def turn_to(self, part: Part) -> None:
        """What the worker does from now on is of another part."""
        marks = self._step.marks
        if marks and (before := marks[-1].part) != part:
            marks.append(self._mark(part, compute="compute" in (before, part)))

    def took(self, tokens: int, read_s: float) -> None:
        """The worker has computed a micro-batch of so many tokens, which took so long to read."""
        self._step.micro_batches += 1
        self._step.tokens += tokens
        self._step.read_s += read_s

    def _mark(self, part: Part, *, compute: bool) -> _Mark:
        awake_s = self._awake() if compute and self._awake is not None else 0.0
        return _Mark(part, self._stamp(), awake_s)

    def committed(self, step: int) -> StepTimes | None:
        """The host has waited for `step`: counts the one before it. Returns a window that is
        full."""
        whole, self._whole = self._whole, None
        if whole is None:
            return None
        self._count(whole)
        self._steps, self._last = self._steps + 1, step - 1
        return self.take() if self._steps == WINDOW_STEPS else None

    def _count(self, whole: _Step) -> None:
        seconds, awake_s = dict.fromkeys(PARTS, 0.0), 0.0
        for begin, end in pairwise(whole.marks):
            seconds[begin.part] += self._between(begin.stamp, end.stamp)
            awake_s += end.awake_s - begin.awake_s if begin.part == "compute" else 0.0
        for part, passed in seconds.items():
            self._sums[part] += passed
        self._own = OwnTimes(
            step_s=sum(seconds.values()),
            micro_batches=whole.micro_batches,
            tokens=whole.tokens,
            data_s=seconds["data"],
            read_s=whole.read_s,
            compute_s=self._compute_s(whole, seconds["compute"], awake_s),
            optimizer_s=seconds["optimizer"],
        )

    def _compute_s(self, whole: _Step, streamed_s: float, awake_s: float) -> float:
        if whole.blocks and self._blocks is not None:
            return self._blocks.whole_s(whole.blocks, self._between)
        return streamed_s if self._on_cuda else awake_s

    def take_own(self) -> OwnTimes | None:
        """The own times of the step that was counted last; None where they were taken."""
        own, self._own = self._own, None
        return own

    def close(self) -> None:
        """There are no more steps. Called by the thread that trains."""
        if self._awake is not None:
            self._awake.close()

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


def _cuda_seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3
