"""When machines under suspicion are not replaced all the same. Pure.

Where many are suspect at once they have something in common that no new machine mends: a switch, a
file system, a driver, a bug of ours. And whoever replaces one after the other is chasing something.
Source of the fifth: EKS node auto repair, which stops where more than 20 % of a node group are
unhealthy.
"""

from __future__ import annotations

from collections.abc import Collection

WINDOW_S = 3600.0
"""What lies further back is not "at once" any more."""
MOST_SUSPECT = 0.2
"""Share of the machines that may be suspect at once. A single one may be, however few there are."""


def decide_hold(
    *,
    machines: int,
    suspected: Collection[float],
    replaced: Collection[float],
    now: float,
    most_per_hour: int,
) -> str | None:
    """Why no machine is replaced now, with the numbers; None where one may be.

    Args:
        machines: that the run works on, the suspect ones included.
        suspected: when each machine that is suspect became so, in seconds since the epoch.
        replaced: when each replacement of the run began.
        now: in seconds since the epoch.
        most_per_hour: `health.max_replacements_per_hour`.
    """
    suspects = _recent(suspected, now)
    if suspects > 1 and suspects > MOST_SUSPECT * machines:
        return (
            f"{suspects} of {machines} machines became suspect within an hour, more than "
            f"{MOST_SUSPECT:.0%}: look for what they have in common"
        )
    begun = _recent(replaced, now)
    if begun >= most_per_hour:
        return (
            f"{begun} replacements began within an hour "
            f"(health.max_replacements_per_hour = {most_per_hour})"
        )
    return None


def _recent(times: Collection[float], now: float) -> int:
    return sum(now - time < WINDOW_S for time in times)
