"""The learning rate: warm-up, cosine, and its ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.optimizer import WarmupCosine


def rates(steps: int, **values: float) -> list[float]:
    schedule = WarmupCosine(**{"lr": 1.0, "min_lr_ratio": 0.2, **values})  # type: ignore[arg-type]
    return [schedule.rate(step, steps) for step in range(steps)]


def test_the_warm_up_is_a_straight_line_up_to_the_peak() -> None:
    assert rates(20, warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_the_decay_is_a_half_cosine() -> None:
    """Between 1 and 0.2 over 4 steps: 0.6 + 0.4 cos(0, 45°, 90°, 135°, 180°)."""
    diagonal = 0.4 * 0.5**0.5
    assert rates(5) == pytest.approx([1.0, 0.6 + diagonal, 0.6, 0.6 - diagonal, 0.2])


def test_a_ratio_of_one_keeps_the_rate() -> None:
    assert rates(6, min_lr_ratio=1.0, lr=3e-4) == pytest.approx([3e-4] * 6)


def test_a_run_of_one_step_takes_the_peak() -> None:
    assert rates(1) == [1.0]


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    assert rates(3, warmup_steps=10) == pytest.approx([0.1, 0.2, 0.3])


@settings(deadline=None)
@given(
    warmup_steps=st.integers(0, 20),
    decay_steps=st.integers(2, 40),
    min_lr_ratio=st.floats(0, 1),
    lr=st.floats(1e-6, 10),
)
def test_it_rises_then_falls_to_the_minimum(
    warmup_steps: int, decay_steps: int, min_lr_ratio: float, lr: float
) -> None:
    steps = warmup_steps + decay_steps
    found = rates(steps, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio, lr=lr)
    rise, fall = found[:warmup_steps], found[warmup_steps:]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert fall[0] == pytest.approx(lr)
    assert found[-1] == pytest.approx(min_lr_ratio * lr, abs=1e-15)
    assert 0 <= min(found) <= max(found) <= lr * (1 + 1e-12)
