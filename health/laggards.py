"""From a worker's place in its work to a verdict: is it stuck? Pure.

A worker that is called away and does not come may be at work that takes long: an evaluation, an
upload, the first step of a model that is compiled. It enters a new phase of it now and then. One
that is stuck does not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a worker is in its work."""

    phase: str
    """The phase it is in, with its step."""
    in_phase_s: float
    """How long it has been in it, in seconds."""


def patience_left_s(position: Position | None, timeout_s: float) -> float:
    """How much longer to wait for a worker that was called more than `timeout_s` ago.

    Args:
        position: where it is; None where nobody can tell.
        timeout_s: how long one phase may take.

    Returns:
        Seconds; 0 for one that is stuck.
    """
    return 0.0 if position is None else max(0.0, timeout_s - position.in_phase_s)
