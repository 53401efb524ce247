"""How often to save: Young's optimum, within bounds."""

from __future__ import annotations

import pytest

from checkpointing import estimate_mtbf, plan_interval


def lost_share(interval_s: float, held_s: float, mtbf_s: float) -> float:
    """Of a run's time, to saves and to steps done again."""
    return held_s / interval_s + interval_s / 2 / mtbf_s


@pytest.mark.parametrize(("held_s", "mtbf_s"), [(1.0, 3600.0), (30.0, 86_400.0), (0.2, 600.0)])
def test_no_other_interval_loses_less(held_s: float, mtbf_s: float) -> None:
    best = plan_interval(held_s=held_s, write_s=0, mtbf_s=mtbf_s, least_s=0, most_s=1e9)
    least = lost_share(best, held_s, mtbf_s)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert lost_share(best * factor, held_s, mtbf_s) > least


@pytest.mark.parametrize(
    ("held_s", "write_s", "expected"),
    [
        (2.0, 0.0, 120.0),  # the root of 2 * 2 * 3600
        (0.0, 0.0, 60.0),
        (2.0, 300.0, 300.0),  # no sooner than the one before is written
        (2.0, 5000.0, 1000.0),
        (1e6, 0.0, 1000.0),
    ],
)
def test_the_bounds(held_s: float, write_s: float, expected: float) -> None:
    found = plan_interval(
        held_s=held_s, write_s=write_s, mtbf_s=3600.0, least_s=60.0, most_s=1000.0
    )
    assert found == pytest.approx(expected)


def test_what_happens_outweighs_what_was_assumed() -> None:
    assert estimate_mtbf(prior_s=3600, running_s=0, failures=0) == 3600
    assert estimate_mtbf(prior_s=3600, running_s=3600, failures=1) == 3600
    assert estimate_mtbf(prior_s=3600, running_s=36_000, failures=99) == 396
    assert estimate_mtbf(prior_s=3600, running_s=360_000, failures=0) == 363_600
