"""From losses to a decision: go on, or end the run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import get_args

from elastic.config import HealthConfig
from elastic.protocol.causes import Budget, Cause, entry_of

_MISSING = set(get_args(Budget)) - {field.name for field in fields(HealthConfig)}
if _MISSING:
    raise TypeError(f"budgets of causes that HealthConfig lacks: {sorted(_MISSING)}")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A worker that was lost."""

    cause: Cause
    """Why."""
    step: int | None
    """The step it was in, where known."""
    committed: int
    """Steps that the run had committed by then."""
    detail: str
    """The evidence; the user's own traceback for an error in user code."""
    formation: int | None = None
    """Number of the replica in which user code raised: one that is formed anew is another try."""


def decide_failure(losses: Sequence[Loss], health: HealthConfig) -> str | None:
    """Why the run should end now, or None to go on.

    An exception in user code that comes back at the same step in another replica, or in the same
    one formed anew, is a bug, not bad luck. Workers of one replica that raise together are one try.
    """
    if not losses:
        return None
    last = losses[-1]
    entry = entry_of(last.cause)
    if entry.of_user_code:
        same = [
            loss
            for loss in losses
            if (loss.cause, loss.step) == (last.cause, last.step)
            and (last.step is not None or loss.committed == last.committed)
        ]
        tries = len({loss.formation for loss in same})
        if tries >= health.max_same_step_errors:
            where = f"at step {last.step}"
            if last.step is None:
                where = f"while a replica was built, with {last.committed} steps committed,"
            return (
                f"user code failed {tries} times {where} "
                f"(health.max_same_step_errors = {health.max_same_step_errors}):\n{last.detail}"
            )
    limit: int = getattr(health, entry.budget)
    stuck = {
        ("together", loss.formation) if entry_of(loss.cause).of_user_code else ("alone", number)
        for number, loss in enumerate(losses)
        if loss.committed == last.committed and entry_of(loss.cause).budget == entry.budget
    }
    if len(stuck) >= limit:
        return (
            f"{len(stuck)} workers were lost with {last.committed} steps committed and no progress "
            f"(health.{entry.budget} = {limit}); the last one: {last.cause}, {last.detail}"
        )
    return None
