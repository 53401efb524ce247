from __future__ import annotations

import dataclasses
import itertools

from elastic.config import HealthConfig
from elastic.membership.failure import Loss, decide_failure
from elastic.protocol.causes import Cause

HEALTH = HealthConfig(max_same_step_errors=2, max_crashes=4, max_hangs=2)


_formations = itertools.count()


def loss(
    cause: str = "crash", step: int | None = None, committed: int = 0, detail: str = "killed"
) -> Loss:
    return Loss(cause=Cause(cause), step=step, committed=committed, detail=detail)


def user_error(step: int | None, committed: int = 0, formation: int | None = None) -> Loss:
    """In a replica of its own, unless it is named."""
    if formation is None:
        formation = next(_formations)
    found = loss("user_error", step, committed, "Traceback: ZeroDivisionError")
    return dataclasses.replace(found, formation=formation)


def test_without_losses_the_run_goes_on() -> None:
    assert decide_failure([], HEALTH) is None


def test_losses_with_progress_in_between_never_end_a_run() -> None:
    assert decide_failure([loss(committed=step) for step in range(100)], HEALTH) is None


def test_too_many_losses_without_progress_end_it() -> None:
    losses = [loss(committed=1), *(loss(committed=7) for _ in range(3))]
    assert decide_failure(losses, HEALTH) is None
    assert decide_failure([*losses, loss("node", committed=7, detail="gone")], HEALTH) == (
        "4 workers were lost with 7 steps committed and no progress "
        "(health.max_crashes = 4); the last one: node, gone"
    )


def test_each_cause_has_its_own_budget() -> None:
    losses = [*(loss(committed=7) for _ in range(3)), loss("hang", committed=7)]
    assert decide_failure(losses, HEALTH) is None
    assert decide_failure([*losses, loss("hang", committed=7, detail="frozen")], HEALTH) == (
        "2 workers were lost with 7 steps committed and no progress "
        "(health.max_hangs = 2); the last one: hang, frozen"
    )
    many = [loss("preemption", committed=7) for _ in range(100)]
    assert decide_failure(many, HEALTH) is None


def test_the_same_error_at_the_same_step_ends_it() -> None:
    assert decide_failure([user_error(3)], HEALTH) is None
    assert decide_failure([user_error(3), loss(step=3), user_error(3)], HEALTH) == (
        "user code failed 2 times at step 3 (health.max_same_step_errors = 2):\n"
        "Traceback: ZeroDivisionError"
    )


def test_workers_of_one_replica_that_raise_together_are_one_try() -> None:
    together = [user_error(3, formation=7), user_error(3, formation=7)]
    assert decide_failure(together, HEALTH) is None
    assert decide_failure([*together, user_error(3, formation=8)], HEALTH) is not None
    many = [user_error(3, formation=7) for _ in range(HEALTH.max_crashes)]
    assert decide_failure(many, HEALTH) is None, "one of the crashes, too"


def test_errors_outside_of_any_step_count_while_there_is_no_progress() -> None:
    reason = decide_failure([user_error(None, 7), user_error(None, 7)], HEALTH)
    assert reason is not None
    assert reason.startswith("user code failed 2 times while a replica was built, with 7 steps")
    assert decide_failure([user_error(None, 7), user_error(None, 8)], HEALTH) is None


def test_errors_at_different_steps_and_crashes_at_one_are_bad_luck() -> None:
    assert decide_failure([user_error(3, 3), user_error(4, 4), user_error(5, 5)], HEALTH) is None
    assert decide_failure([loss(step=3), loss(step=3)], HEALTH) is None


def test_a_crash_after_an_error_does_not_repeat_the_error() -> None:
    health = HealthConfig(max_same_step_errors=1)
    assert decide_failure([user_error(3)], health) is not None
    assert decide_failure([user_error(3), loss(committed=1)], health) is None
