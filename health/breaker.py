"""When machines under suspicion are not replaced all the same. Pure.

Where many are suspect at once they have something in common that no new machine mends: a switch, a
file system, a driver, a bug of ours. And whoever replaces one after the other is chasing something.
Source of the fifth: EKS node auto repair, which stops where more than 20 % of a node group are
unhealthy.
"""

from __future__ import annotations

from collections.abc import Collection

AT_ONCE_S, HOUR_S = 600.0, 3600.0
MOST_SUSPECT = 0.2
"""Share of the machines that may be suspect at once. A single one may be, however few there are."""


def decide_hold(
    *,
    machines: int,
    suspects: int,
    settled: Collection[float],
    begun: Collection[float],
    now: float,
    most_per_hour: int,
) -> str | None:
    """Why no machine is replaced now, with the numbers; None where one may be.

    Args:
        machines: that the run works on, the suspect ones included.
        suspects: those of them that something is still to be done about, and those that could not
            be replaced, where it works on several.
        settled: since when nothing more is done about each one that was suspect, as it is replaced;
            or since when it waits for another to come. Within `AT_ONCE_S` it counts on: what they
            have in common goes on.
        begun: when each replacement of the run began.
        now: in seconds since the epoch, as all times.
        most_per_hour: `health.max_replacements_per_hour`.
    """
    at_once = suspects + _count(settled, since=now - AT_ONCE_S)
    if at_once > 1 and at_once > MOST_SUSPECT * machines:
        return (
            f"{at_once} of {machines} machines are suspect at once, more than {MOST_SUSPECT:.0%}: "
            f"look for what they have in common"
        )
    lately = _count(begun, since=now - HOUR_S)
    if lately >= most_per_hour:
        return (
            f"{lately} replacements began within an hour "
            f"(health.max_replacements_per_hour = {most_per_hour})"
        )
    return None


def _count(times: Collection[float], *, since: float) -> int:
    return sum(time > since for time in times)
