"""What `benchmarks.goodput` reckons with: schedules, shares, and their medians."""

from __future__ import annotations

import pytest

from benchmarks.goodput import plan_kills, share_done, summarise


def test_a_seed_names_one_schedule_of_about_the_rate_asked_for() -> None:
    assert plan_kills(1.0, 15.0, 3) == plan_kills(1.0, 15.0, 3) != plan_kills(1.0, 15.0, 4)
    kills = [kill for seed in range(300) for kill in plan_kills(1.0, 15.0, seed)]
    assert all(0 < at_s < 60 and 0 <= which < 1 for at_s, which in kills)
    assert len(kills) / 300 == pytest.approx(4.0, rel=0.1)
    assert plan_kills(1.0, 1e9, 0) == []


def test_the_share_is_of_the_pace_before_the_fire_and_counts_a_step_once() -> None:
    free = [(100 + i / 10, i + 1) for i in range(231)]  # 3 s of settling, 20 s free
    stands = [(160.0, 500), (161.0, 400), (170.0, 500)]  # 100 steps are done again
    late = [(182.9, 531), (183.1, 700)]  # the fire ends at 183
    found = share_done([*free, *stands, *late], 20.0, 1.0)
    assert found == {"share": 0.5, "steps_per_s_before": 10.0}


def test_a_run_that_keeps_its_pace_has_all_of_it() -> None:
    progress = [(100 + i / 10, i + 1) for i in range(1000)]
    assert share_done(progress, 20.0, 1.0)["share"] == pytest.approx(1.0, abs=0.002)


def test_the_median_of_the_rounds_is_reported() -> None:
    rounds = [
        {"elastic": {"share": ours}, "ray_train": {"share": theirs}}
        for ours, theirs in [(0.9, 0.1), (1.0, 0.5), (0.98, 0.4)]
    ]
    found = summarise(rounds, [3, 5, 2])
    assert (found["elastic"], found["ray_train"], found["faults"]) == (0.98, 0.4, 10)
    assert [each["faults"] for each in found["details"]] == [3, 5, 2]
    assert found["details"][1]["ray_train"] == {"share": 0.5}
