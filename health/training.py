"""Whether a run still learns: from the losses and gradient norms of its steps to a finding. Pure.

A value stands out where it lies far above the steps before it: above their median by so many times
their spread, which is 1.4826 times the median absolute deviation (the standard deviation, of
normally distributed values; outliers do not move it) and at least one per cent of the median. Where
most values are exactly 0 there is no spread, and none stands out. One such step is the data's
affair; several in a row are a finding, told once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Kind = Literal["nonfinite", "loss_spike", "norm_spike", "no_progress"]

_TO_SIGMA = 1.4826
_LEAST_SHARE = 0.01
"""Of the median: the spread of values that hardly vary is taken for this much."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What is known of a committed step."""

    step: int
    """Its index."""
    loss: float
    """Mean loss in nats."""
    grad_norm: float
    """Norm of the gradient before clipping."""

    @property
    def finite(self) -> bool:
        """Whether it reached the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is put up with."""

    window_steps: int
    """Steps that others are held against."""
    spike_steps: int
    """Steps in a row that stand out."""
    loss_sigmas: float | None
    """Spreads above the median; None: losses are not looked at."""
    norm_sigmas: float | None
    """The same of gradient norms."""
    nonfinite_steps: int
    """Steps in a row that are not finite."""
    progress_steps: int | None
    """Steps in which the loss must fall; None: it need not."""

    @property
    def streak_steps(self) -> int:
        """Steps that a finding is of, at most."""
        return max(self.spike_steps, self.nonfinite_steps)

    @property
    def history_steps(self) -> int:
        """Steps, up to the last one, that a finding depends on."""
        looks_back = self.progress_steps or 0
        spike = self.spike_steps + 1
        return max(self.window_steps + max(spike, looks_back), self.nonfinite_steps + 1)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something is wrong with the training."""

    kind: Kind
    """What."""
    first: int
    """The first step that shows it."""
    last: int
    """The last one: the finding is due when it is committed."""
    detail: str
    """The evidence in one line."""


def find_trouble(history: Sequence[StepFacts], limits: Limits) -> list[Finding]:
    """What the last of some steps shows, that the one before it did not, each kind once.

    A function of the last `limits.history_steps` steps alone: whoever has them comes to the same
    findings.

    Args:
        history: committed steps that follow each other; more than are needed do no harm.
        limits: what is put up with.
    """
    history = history[-limits.history_steps :]
    found = (
        _nonfinite(history, limits.nonfinite_steps),
        _spike(history, "loss_spike", limits),
        _spike(history, "norm_spike", limits),
        _no_progress(history, limits),
    )
    return [finding for finding in found if finding is not None]


def _nonfinite(history: Sequence[StepFacts], count: int) -> Finding | None:
    streak = history[-count:]
    before = history[-count - 1 : -count]
    if len(streak) < count or any(s.finite for s in streak) or any(not s.finite for s in before):
        return None
    detail = f"the loss or the gradient norm was not finite in {count} steps in a row"
    return Finding(kind="nonfinite", first=streak[0].step, last=streak[-1].step, detail=detail)


def _spike(history: Sequence[StepFacts], kind: Kind, limits: Limits) -> Finding | None:
    detail = _standing_out(history, kind, limits)
    if detail is None or _standing_out(history[:-1], kind, limits) is not None:
        return None
    first, last = history[-limits.spike_steps].step, history[-1].step
    return Finding(kind=kind, first=first, last=last, detail=detail)


def _standing_out(history: Sequence[StepFacts], kind: Kind, limits: Limits) -> str | None:
    """How far the last steps stand out; None: they do not."""
    of_loss = kind == "loss_spike"
    sigmas = limits.loss_sigmas if of_loss else limits.norm_sigmas
    if sigmas is None:
        return None
    window, streak = limits.window_steps, history[-limits.spike_steps :]
    earlier = history[: -limits.spike_steps][-window:]
    values = [s.loss if of_loss else s.grad_norm for s in earlier if s.finite]
    if len(earlier) < window or 2 * len(values) < window or not all(s.finite for s in streak):
        return None
    middle = median(values)
    spread = max(_TO_SIGMA * median(abs(v - middle) for v in values), _LEAST_SHARE * abs(middle))
    if not spread:
        return None
    bound = middle + sigmas * spread
    found = [s.loss if of_loss else s.grad_norm for s in streak]
    if min(found) <= bound:
        return None
    return (
        f"the {'loss' if of_loss else 'gradient norm'} was above {bound:.4g} in {len(found)} steps "
        f"in a row, {max(found):.4g} at most; its median over the {len(values)} steps before is "
        f"{middle:.4g}"
    )


def _no_progress(history: Sequence[StepFacts], limits: Limits) -> Finding | None:
    """Looked at once in `progress_steps`."""
    span, window = limits.progress_steps, limits.window_steps
    if span is None or len(history) < span + window or (history[-1].step + 1) % span:
        return None
    then = [s.loss for s in history[-span - window : -span] if s.finite]
    now = [s.loss for s in history[-window:] if s.finite]
    if not then or not now or median(now) < median(then):
        return None
    detail = (
        f"the loss did not fall in {span} steps: its median over {window} steps was "
        f"{median(then):.4g}, and is {median(now):.4g}"
    )
    first = history[-span].step
    return Finding(kind="no_progress", first=first, last=history[-1].step, detail=detail)
