"""How fast a worker does its own part of the steps.

Medians over some steps, so a step that takes five times as long for once is not in them. A window
is closed by steps and by time: where steps are short it holds many, and where they are long, few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LEAST_STEPS, LEAST_S = 5, 2.0
"""Of a window. Invented."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Of a worker in the steps of a window; times are in seconds."""

    number: int
    """Of the window; they only grow."""
    step_s: float
    """A whole step."""
    micro_batches: float
    """Micro-batches in a step."""
    tokens: float
    """Tokens of a micro-batch."""
    data_s: float
    """Waiting for a micro-batch's samples."""
    read_s: float
    """Reading them, which goes on beside the step."""
    compute_s: float
    """Forward and backward of a micro-batch."""
    optimizer_s: float
    """An optimizer step."""


def pace_of(number: int, values: Sequence[float]) -> Pace:
    """The pace with these values of its fields, in their order, after the number."""
    step_s, micro_batches, tokens, data_s, read_s, compute_s, optimizer_s = values
    return Pace(
        number=number,
        step_s=step_s,
        micro_batches=micro_batches,
        tokens=tokens,
        data_s=data_s,
        read_s=read_s,
        compute_s=compute_s,
        optimizer_s=optimizer_s,
    )


class PaceWindow:
    """Takes a worker's steps, and gives a pace whenever a window is full."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, ...]] = []
        self._span_s = 0.0
        self._number = 0

    def add(
        self,
        *,
        step_s: float,
        micro_batches: int,
        tokens: int,
        data_s: float,
        read_s: float,
        compute_s: float,
        optimizer_s: float,
    ) -> Pace | None:
        """One more step, all of it; see `Pace`. One without a micro-batch says nothing."""
        if micro_batches == 0:
            return None
        shared = (total / micro_batches for total in (tokens, data_s, read_s, compute_s))
        self._steps.append((step_s, micro_batches, *shared, optimizer_s))
        self._span_s += step_s
        if len(self._steps) < LEAST_STEPS or self._span_s < LEAST_S:
            return None
        medians = [median(values) for values in zip(*self._steps, strict=True)]
        self._steps, self._span_s, self._number = [], 0.0, self._number + 1
        return pace_of(self._number, medians)
