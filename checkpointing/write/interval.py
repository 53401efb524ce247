"""How often to save, from what a save costs and how often a run fails. Pure."""

from __future__ import annotations

import math


def plan_interval(
    *, held_s: float, write_s: float, mtbf_s: float, least_s: float, most_s: float
) -> float:
    """Seconds from one checkpoint to the next that lose the least time to saves and to failures.

    With saves every T seconds a run loses held_s / T of its time to them, and T / 2 at each failure
    that takes all copies of the state: together least at T = sqrt(2 held_s mtbf_s). A save that
    falls due while the last one is being written would be skipped, so T is not below `write_s`.
    Source: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
    1974; refined by Daly, FGCS 22(3), 2006, for intervals near the time between failures.

    Args:
        held_s: how long a save holds up the training.
        write_s: from the copy of the state until the checkpoint counts.
        mtbf_s: time between failures, see `estimate_mtbf`.
        least_s: bound from below.
        most_s: bound from above, which is above all others.
    """
    best_s = math.sqrt(2 * max(0.0, held_s) * mtbf_s)
    return min(most_s, max(least_s, write_s, best_s))


def estimate_mtbf(*, prior_s: float, running_s: float, failures: int) -> float:
    """Time between failures, in seconds, after `failures` of them in `running_s`.

    `prior_s` counts as a time with one failure that was observed before: it decides at the start,
    and what happens outweighs it later (the posterior mean of a Poisson rate under a gamma prior of
    shape 1, inverted).
    """
    return (prior_s + running_s) / (1 + failures)
