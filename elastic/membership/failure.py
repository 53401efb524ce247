"""From losses to a decision: go on, or end the run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import get_args

from elastic.config import HealthConfig
from elastic.protocol.causes import Budget, Cause, entry_of

_MISSING = set(get_args(Budget)) - {field.name for field in fields(HealthConfig)}
if _MISSING:
    raise TypeError(f"budgets of causes that HealthConfig lacks: {sorted(_MISSING)}")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 16.0
"""Before a roster makes its groups, where those of the roster before failed with nobody lost."""

INCIDENT_S = 10.0
"""Workers that are lost within so many seconds of the first are one incident: a machine, a switch,
a rack. By then each beat and heartbeat that a common cause has stopped is missed."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A worker that was lost."""

    time: float
    """When, in Unix seconds."""
    seat: int
    """Its rank among Ray Train's workers, which its successor takes over."""
    cause: Cause
    """Why."""
    step: int | None
    """The step it was in, where known."""
    committed: int
    """Steps that the run had committed by then."""
    detail: str
    """The evidence; the user's own traceback for an error in user code."""
    formation: int | None = None
    """Number of the replica in which it raised an exception: one that is formed anew is another
    try."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why the run should end now."""

    error: str
    """In words."""
    cause: Cause | None
    """What came back at the same step; None where a budget is spent."""


def decide_failure(losses: Sequence[Loss], health: HealthConfig) -> Failure | None:
    """Why the run should end now, or None to go on.

    Args:
        losses: all of the run, in the order of time.
        health: the budgets.
    """
    if not losses:
        return None
    repeated = _decide_repeated(losses, health)
    if repeated is not None:
        return Failure(error=repeated, cause=losses[-1].cause)
    stuck = _decide_stuck(losses, health)
    return None if stuck is None else Failure(error=stuck, cause=None)


def _decide_repeated(losses: Sequence[Loss], health: HealthConfig) -> str | None:
    """An exception in user code that comes back at the same step in another replica, or in the same
    one formed anew, is a bug, not bad luck. Workers of one replica that raise together are one try.
    """
    last = losses[-1]
    if not entry_of(last.cause).repeats:
        return None
    tries = {
        loss.formation
        for loss in losses
        if (loss.cause, loss.step) == (last.cause, last.step)
        and (last.step is not None or loss.committed == last.committed)
    }
    if len(tries) < health.max_same_step_errors:
        return None
    where = f"at step {last.step}"
    if last.step is None:
        where = f"while a replica was built, with {last.committed} steps committed,"
    return (
        f"{entry_of(last.cause).text}, {len(tries)} times {where} "
        f"(health.max_same_step_errors = {health.max_same_step_errors}):\n{last.detail}"
    )


def _decide_stuck(losses: Sequence[Loss], health: HealthConfig) -> str | None:
    """Incidents without a step in between use up the budget of their cause."""
    last = losses[-1]
    budget = entry_of(last.cause).budget
    limit: int = getattr(health, budget)
    stuck = _stuck(losses, budget, last.committed)
    incidents = count_incidents(stuck)
    if incidents < limit:
        return None
    return (
        f"{incidents} incidents took {len(stuck)} workers with {last.committed} steps committed "
        f"and no progress (health.{budget} = {limit}); the last one: {last.cause}, {last.detail}"
    )


def find_spent(
    losses: Sequence[Loss], health: HealthConfig, committed: int
) -> dict[str, tuple[int, int]]:
    """What is used up of each budget of incidents without a step in between, and the budget.

    Args:
        losses: all of the run, in the order of time.
        health: the budgets.
        committed: steps that the run has committed.
    """
    return {
        budget: (count_incidents(_stuck(losses, budget, committed)), getattr(health, budget))
        for budget in get_args(Budget)
    }


def _stuck(losses: Sequence[Loss], budget: Budget, committed: int) -> list[Loss]:
    """Losses that count against a budget, with so many steps committed."""
    return [
        loss
        for loss in losses
        if loss.committed == committed and entry_of(loss.cause).budget == budget
    ]


def decide_in_vain(
    regroups: int, step: int, most: int, reason: str | None, failed_links: str | None
) -> str | None:
    """Why the run should end after so many `regroups` in a row for faults, or None to go on.

    Args:
        regroups: with no step committed and no worker lost in between.
        step: where they went on.
        most: `health.max_regroups_without_progress`.
        reason: why a group across replicas failed last, where a worker has told.
        failed_links: connections between the workers that have failed, in words; "": all were
            tried and are good; None: they were not tried.
    """
    if regroups < most:
        return None
    return (
        f"{regroups} regroups in a row at step {step}, with no progress and no worker lost "
        f"(health.max_regroups_without_progress = {most}): collectives across replicas fail while "
        f"all workers live. The last failure: {reason or 'no worker said why'}. "
        f"{_describe_links(failed_links)}Look at the network between the nodes: links, MTU, "
        f"firewalls, the interface that Gloo or NCCL takes"
    )


def _describe_links(failed: str | None) -> str:
    if failed is None:
        return ""
    if not failed:
        return "All connections between them were tried over TCP, and are good. "
    return (
        f"Connections that failed when they were tried: {failed}. Nobody was taken out for them: "
        f"fewer replicas than scaling.min_replicas would be left, or none with state. "
    )


def plan_pause_s(regroups: int) -> float:
    """How long a roster waits before it makes its groups, after so many regroups in a row as for
    `decide_in_vain`. Each fails within a tenth of a second where a link is down: without pauses a
    link that comes back in two seconds would come too late."""
    if regroups < 2:
        return 0.0
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (regroups - 2))


def count_incidents(losses: Iterable[Loss]) -> int:
    """Losses with one cause in common, as far as time and place tell: those of one replica that
    raised together, and those of different seats within `INCIDENT_S` of the first. A seat that is
    lost again is another incident, however soon, since its worker was new."""
    count, began, seats = 0, float("-inf"), set[int]()
    raised = set[int]()
    for loss in losses:
        if loss.formation in raised:
            continue
        if loss.formation is not None:
            raised.add(loss.formation)
        if loss.time - began > INCIDENT_S or loss.seat in seats:
            count, began, seats = count + 1, loss.time, set()
        seats.add(loss.seat)
    return count
