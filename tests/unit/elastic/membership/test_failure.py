from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest

from elastic.config import HealthConfig
from elastic.membership import failure
from elastic.membership.failure import Loss, decide_in_vain, find_spent, plan_pause_s
from elastic.protocol.causes import OUT_OF_MEMORY, Cause

HEALTH = HealthConfig(max_same_step_errors=2, max_crashes=4, max_hangs=2)


def decide_failure(losses: Sequence[Loss], health: HealthConfig) -> str | None:
    """The error that ends the run."""
    found = failure.decide_failure(losses, health)
    return None if found is None else found.error


_formations = itertools.count()
_minutes = itertools.count()
"""Each loss is an incident of its own, unless its time is given."""


def together(count: int, cause: str, time: float, first_seat: int = 0) -> list[Loss]:
    """Workers of different seats, lost within a second."""
    return [
        dataclasses.replace(loss(cause), time=time + n / count, seat=first_seat + n)
        for n in range(count)
    ]


def loss(
    cause: str = "crash", step: int | None = None, committed: int = 0, detail: str = "killed"
) -> Loss:
    return Loss(
        time=next(_minutes) * 60.0,
        seat=0,
        cause=Cause(cause),
        step=step,
        committed=committed,
        detail=detail,
    )


def user_error(step: int | None, committed: int = 0, formation: int | None = None) -> Loss:
    """In a replica of its own, unless it is named."""
    if formation is None:
        formation = next(_formations)
    found = loss("user_error", step, committed, "Traceback: ZeroDivisionError")
    return dataclasses.replace(found, formation=formation)


def test_a_link_has_half_a_minute_to_come_back_before_the_default_budget_is_spent() -> None:
    most = HealthConfig().max_regroups_without_progress
    pauses = [plan_pause_s(regroups) for regroups in range(1, most)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert plan_pause_s(50) == 16.0
    assert decide_in_vain(most - 1, 5, most, "reset", None) is None
    error = decide_in_vain(most, 5, most, None, None)
    assert error is not None and "no worker said why. Look at the network" in error


@pytest.mark.parametrize(
    ("failed", "told"),
    [
        ("", "reset. All connections between them were tried over TCP, and are good. Look at"),
        (
            "a (node A) to b (node B): 64 of 1,000 bytes in 10 s",
            "reset. Connections that failed when they were tried: a (node A) to b (node B): 64 of "
            "1,000 bytes in 10 s. Nobody was taken out for them: fewer replicas than "
            "scaling.min_replicas would be left",
        ),
    ],
)
def test_regroups_in_vain_end_with_what_the_connections_have_shown(failed: str, told: str) -> None:
    error = decide_in_vain(8, 5, 8, "reset", failed)
    assert error is not None and told in error


def test_without_losses_the_run_goes_on() -> None:
    assert decide_failure([], HEALTH) is None


def test_losses_with_progress_in_between_never_end_a_run() -> None:
    assert decide_failure([loss(committed=step) for step in range(100)], HEALTH) is None


def test_too_many_losses_without_progress_end_it() -> None:
    losses = [loss(committed=1), *(loss(committed=7) for _ in range(3))]
    assert decide_failure(losses, HEALTH) is None
    assert decide_failure([*losses, loss("node", committed=7, detail="gone")], HEALTH) == (
        "4 incidents took 4 workers with 7 steps committed and no progress "
        "(health.max_crashes = 4); the last one: node, gone"
    )


def test_each_cause_has_its_own_budget() -> None:
    losses = [*(loss(committed=7) for _ in range(3)), loss("hang", committed=7)]
    assert decide_failure(losses, HEALTH) is None
    assert decide_failure([*losses, loss("hang", committed=7, detail="frozen")], HEALTH) == (
        "2 incidents took 2 workers with 7 steps committed and no progress "
        "(health.max_hangs = 2); the last one: hang, frozen"
    )
    many = [loss("preemption", committed=7) for _ in range(100)]
    assert decide_failure(many, HEALTH) is None


def test_the_same_error_at_the_same_step_ends_it() -> None:
    assert decide_failure([user_error(3)], HEALTH) is None
    assert decide_failure([user_error(3), loss(step=3), user_error(3)], HEALTH) == (
        "user code raised, 2 times at step 3 (health.max_same_step_errors = 2):\n"
        "Traceback: ZeroDivisionError"
    )


def test_workers_of_one_replica_that_raise_together_are_one_try() -> None:
    both = [user_error(3, formation=7), user_error(3, formation=7)]
    assert decide_failure(both, HEALTH) is None
    assert decide_failure([*both, user_error(3, formation=8)], HEALTH) is not None
    many = [user_error(3, formation=7) for _ in range(HEALTH.max_crashes)]
    assert decide_failure(many, HEALTH) is None, "one of the crashes, too"


def test_errors_of_one_replica_after_the_other_are_a_crash_each() -> None:
    """Where more tries are allowed at one step than crashes without progress."""
    health = HealthConfig(max_same_step_errors=9, max_crashes=4)
    errors = [user_error(3, committed=3) for _ in range(4)]
    assert decide_failure(errors[:3], health) is None
    reason = decide_failure(errors, health)
    assert reason is not None and reason.startswith("4 incidents took 4 workers with 3 steps")


def test_errors_outside_of_any_step_count_while_there_is_no_progress() -> None:
    reason = decide_failure([user_error(None, 7), user_error(None, 7)], HEALTH)
    assert reason is not None
    assert reason.startswith("user code raised, 2 times while a replica was built, with 7 steps")
    assert decide_failure([user_error(None, 7), user_error(None, 8)], HEALTH) is None


def test_an_error_that_comes_back_at_a_step_counts_whatever_is_in_the_records() -> None:
    """The lead may have died before it showed the step before."""
    assert decide_failure([user_error(3, committed=2), user_error(3, committed=3)], HEALTH)


def test_errors_at_different_steps_and_crashes_at_one_are_bad_luck() -> None:
    assert decide_failure([user_error(3, 3), user_error(4, 4), user_error(5, 5)], HEALTH) is None
    assert decide_failure([loss(step=3), loss(step=3)], HEALTH) is None


def test_a_crash_after_an_error_does_not_repeat_the_error() -> None:
    health = HealthConfig(max_same_step_errors=1)
    assert decide_failure([user_error(3)], health) is not None
    assert decide_failure([user_error(3), loss(committed=1)], health) is None


def test_memory_that_runs_out_at_the_same_step_ends_it() -> None:
    again = [dataclasses.replace(user_error(3), cause=OUT_OF_MEMORY) for _ in range(2)]
    assert decide_failure(again[:1], HEALTH) is None
    reason = decide_failure(again, HEALTH)
    assert reason is not None and reason.startswith("its memory, or its GPU's, ran out, 2 times")
    assert decide_failure([again[0], user_error(3)], HEALTH) is None


def test_machines_without_their_network_are_left_for_others_as_long_as_the_budget_lasts() -> None:
    health = HealthConfig(max_same_step_errors=1, max_crashes=3)
    lost = [loss("network", detail="NCCL goes over TCP") for _ in range(3)]
    assert decide_failure(lost[:2], health) is None
    reason = decide_failure(lost, health)
    assert reason is not None and "(health.max_crashes = 3); the last one: network" in reason


@pytest.mark.parametrize(("cause", "workers"), [("node", 56), ("hang", 16), ("preemption", 200)])
def test_what_a_switch_takes_along_is_one_incident(cause: str, workers: int) -> None:
    assert decide_failure(together(workers, cause, 0.0), HealthConfig()) is None


def test_machines_that_go_one_after_the_other_are_an_incident_each() -> None:
    nodes = [one for node in range(3) for one in together(8, "node", 20.0 * node, 8 * node)]
    assert decide_failure(nodes, HEALTH) is None
    reason = decide_failure([*nodes, *together(1, "crash", 70.0, 24)], HEALTH)
    assert reason is not None and reason.startswith("4 incidents took 25 workers with 0 steps")


@pytest.mark.parametrize("seat", [0, 5])
def test_a_seat_that_is_lost_again_is_an_incident_each_time(seat: int) -> None:
    """Else a worker that dies as soon as it is started would never end a run."""
    soon = [dataclasses.replace(loss(), time=float(second), seat=seat) for second in range(4)]
    assert decide_failure(soon[:3], HEALTH) is None
    assert decide_failure(soon, HEALTH) is not None


def test_what_came_back_is_named_and_what_spent_a_budget_is_not() -> None:
    repeated = failure.decide_failure([user_error(3), user_error(3)], HEALTH)
    assert repeated is not None and repeated.cause == "user_error"
    crashes = [loss(committed=7) for _ in range(HEALTH.max_crashes)]
    spent = failure.decide_failure(crashes, HEALTH)
    assert spent is not None and spent.cause is None


def test_what_is_spent_of_each_budget_counts_from_the_last_step() -> None:
    losses = [loss(committed=6), loss(committed=7), loss("hang", committed=7)]
    budgets = {"max_crashes": (1, 4), "max_hangs": (1, 2), "max_preemptions": (0, 200)}
    assert find_spent(losses, HEALTH, 7) == budgets
    assert {used for used, _ in find_spent(losses, HEALTH, 8).values()} == {0}
