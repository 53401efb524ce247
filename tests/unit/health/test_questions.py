"""When a process that does not answer is stuck, and when it or its asker is only busy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from health.lease import AwakeClock
from health.questions import ANSWER_S, MOST_UNANSWERED, decide_next

LOOK_S = 0.5


def stuck_after(answered: Callable[[float, float], bool], looks_s: list[float]) -> float | None:
    """Looks at a process at these times. Returns when it is found stuck.

    Args:
        answered: takes when a question was asked, and now.
        looks_s: times.
    """
    clock, asked_s, pending = AwakeClock(LOOK_S), -ANSWER_S, list[float]()
    for now_s in looks_s:
        awake_s = clock.tick(now_s)
        if any(answered(then_s, now_s) for then_s in pending):
            pending.clear()
        step = decide_next(len(pending), awake_s - asked_s)
        if step == "ask":
            pending.append(now_s)
            asked_s = awake_s
        if step == "stuck":
            return now_s
    return None


def looks(*stretches: tuple[float, float]) -> list[float]:
    """Times, from one to the other of each stretch."""
    return [
        start + LOOK_S * number
        for start, end in stretches
        for number in range(int((end - start) / LOOK_S))
    ]


def test_one_that_never_answers_is_found_within_seconds() -> None:
    found_s = stuck_after(lambda asked_s, now_s: False, looks((0, 100)))
    assert found_s is not None
    assert ANSWER_S * MOST_UNANSWERED <= found_s <= 2 * ANSWER_S * MOST_UNANSWERED


@pytest.mark.parametrize("late_s", [0.0, 2.0, ANSWER_S + 1, ANSWER_S * (MOST_UNANSWERED - 1)])
def test_one_that_is_busy_is_let_be(late_s: float) -> None:
    def answered(asked_s: float, now_s: float) -> bool:
        return now_s - asked_s >= late_s

    assert stuck_after(answered, looks((0, 1000))) is None


def test_an_asker_that_was_held_up_blames_nobody() -> None:
    """It gets to look once a minute, and hears an answer only once it is awake for longer."""

    def answered(asked_s: float, now_s: float) -> bool:
        return now_s >= 602

    minutes = [60.0 * number for number in range(11)]
    assert stuck_after(answered, minutes + looks((600.5, 1000))) is None
