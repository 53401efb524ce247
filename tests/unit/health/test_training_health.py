from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from health.training import Finding, Limits, StepFacts, find_trouble

LIMITS = Limits(
    window_steps=8,
    spike_steps=2,
    loss_sigmas=5.0,
    norm_sigmas=10.0,
    nonfinite_steps=3,
    progress_steps=None,
)


def steps_of(
    losses: list[float], norms: list[float] | None = None, first: int = 0
) -> list[StepFacts]:
    norms = norms or [1.0] * len(losses)
    return [
        StepFacts(step=first + i, loss=loss, grad_norm=norm)
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]


def found(history: list[StepFacts], limits: Limits = LIMITS) -> list[Finding]:
    """What is found as step after step is committed."""
    return [f for end in range(len(history)) for f in find_trouble(history[: end + 1], limits)]


def test_some_losses_in_a_row_above_the_window_are_a_spike_told_once() -> None:
    # The window's median is 2.0, its deviations 0.1 and 0.2: the MAD is 0.15, the spread 0.22239,
    # and the bound 2.0 + 5 x 0.22239 = 3.112.
    calm = [1.8, 1.9, 2.1, 2.2, 1.8, 1.9, 2.1, 2.2]
    (finding,) = found(steps_of([*calm, 3.2, 3.3, 4.0, 5.0, 2.0], first=20))
    assert (finding.kind, finding.first, finding.last) == ("loss_spike", 28, 29)
    assert "above 3.112 in 2 steps in a row, 3.3 at most" in finding.detail


@pytest.mark.parametrize("losses", [[3.2, 2.0, 3.2, 2.0], [3.1, 3.1, 3.1], [math.inf, 3.2]])
def test_one_alone_or_one_that_is_near_is_none(losses: list[float]) -> None:
    assert found(steps_of([1.8, 1.9, 2.1, 2.2, 1.8, 1.9, 2.1, 2.2, *losses])) == []


def test_before_there_is_a_window_nothing_stands_out() -> None:
    assert found(steps_of([2.0] * 7 + [50.0, 50.0])) == []


def test_losses_that_hardly_vary_have_a_spread_of_one_per_cent() -> None:
    assert found(steps_of([2.0] * 8 + [2.09, 2.09])) == []  # the bound is 2.1
    assert [f.last for f in found(steps_of([2.0] * 8 + [2.11, 2.11]))] == [9]


@pytest.mark.parametrize("window", [[0.0] * 8, [0.0, 0.0, 0.02] * 2 + [0.0, 0.0]])
def test_where_most_values_are_zero_there_is_no_spread_and_none_stands_out(
    window: list[float],
) -> None:
    """As the loss of a model that has learnt all samples by heart, rounded to 0."""
    history = [*window, 1e-9, 1e-9]
    assert found(steps_of(history, history)) == []


def test_gradient_norms_are_looked_at_too() -> None:
    norms = [1.0] * 8 + [1.2, 1.2]  # the bound is 1.1
    (finding,) = found(steps_of([2.0] * 10, norms))
    assert (finding.kind, finding.first) == ("norm_spike", 8)
    assert found(steps_of([2.0] * 10, norms), replace(LIMITS, norm_sigmas=None)) == []


def test_a_spike_of_losses_hides_none_of_gradient_norms() -> None:
    """They mostly come together, and for each the user says what is to be done."""
    told = found(steps_of([2.0] * 8 + [9.0] * 3, [1.0] * 8 + [5.0] * 3))
    assert [(f.kind, f.last) for f in told] == [("loss_spike", 9), ("norm_spike", 9)]


def test_steps_that_are_not_finite_are_counted_and_told_of_once() -> None:
    nan = math.nan
    (finding,) = found(steps_of([2.0] * 9 + [nan, nan, nan, nan] + [2.0]))
    assert (finding.kind, finding.first, finding.last) == ("nonfinite", 9, 11)
    assert found(steps_of([2.0] * 9 + [nan, nan, 2.0, nan])) == []


@pytest.mark.parametrize(
    ("window", "kinds"),
    [
        ([math.inf, 2.0] * 4, ["loss_spike"]),
        ([math.inf, 2.0, math.inf, 2.0, math.inf, 2.0, math.inf, math.inf], []),
    ],
)
def test_at_least_half_of_the_window_must_be_finite_and_the_rest_is_left_out(
    window: list[float], kinds: list[str]
) -> None:
    assert [f.kind for f in found(steps_of([*window, 9.0, 9.0]))] == kinds


def test_a_loss_that_does_not_fall_is_told_of_once_in_so_many_steps() -> None:
    limits = replace(LIMITS, progress_steps=20, loss_sigmas=None)
    falling = [10.0 - 0.1 * i for i in range(60)]
    assert found(steps_of(falling), limits) == []
    level = [*falling[:30], *[falling[29]] * 50]
    told = found(steps_of(level), limits)
    assert found(steps_of([2.0] * 25, first=35), limits) == [], "the window before is not whole"
    # At step 59 the windows are steps 52 to 59 and 32 to 39: both at the level. At 39 it fell.
    assert [(f.kind, f.last) for f in told] == [("no_progress", 59), ("no_progress", 79)]


def test_a_finding_depends_on_no_step_further_back_than_the_limits_say() -> None:
    rng = random.Random(0)
    values = [rng.choice([2.0, 2.05, 2.5, 9.0, math.nan]) for _ in range(400)]
    history = steps_of(values, [rng.choice([1.0, 1.01, 5.0]) for _ in values])
    limits = replace(LIMITS, progress_steps=16)
    count = 0
    for end in range(1, len(history) + 1):
        whole = find_trouble(history[:end], limits)
        count += len(whole)
        assert find_trouble(history[max(0, end - limits.history_steps) : end], limits) == whole
    assert count > 5
