from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from health.lease import AwakeClock, decide_cut_off, decide_hopeless, decide_lost_nodes


def test_the_clock_counts_time_between_ticks_on_time() -> None:
    clock = AwakeClock(0.25)
    assert [clock.tick(now) for now in (100.0, 100.25, 100.5, 101.0)] == [0.0, 0.25, 0.5, 1.0]


def test_of_a_gap_in_which_the_owner_was_held_up_twice_the_interval_counts() -> None:
    clock = AwakeClock(0.25)
    clock.tick(100.0)
    assert clock.tick(160.0) == 0.5
    assert clock.tick(160.25) == 0.75


@given(
    gaps=st.lists(st.floats(0, 60), max_size=50),
    interval_s=st.floats(0.01, 1),
)
def test_the_clock_never_runs_faster_than_time_nor_backwards(
    gaps: list[float], interval_s: float
) -> None:
    clock, now_s, before_s = AwakeClock(interval_s), 0.0, 0.0
    clock.tick(0.0)
    for gap in gaps:
        now_s += gap
        awake_s = clock.tick(now_s)
        assert before_s <= awake_s <= now_s + 1e-6
        before_s = awake_s


def test_a_node_is_lost_when_its_lease_has_run_out() -> None:
    renewed_s = {"a": 10.0, "b": 14.0, "c": 8.0}
    assert decide_lost_nodes(renewed_s, awake_s=15.0, timeout_s=5.0) == {"c": 7.0}
    assert decide_lost_nodes(renewed_s, awake_s=15.5, timeout_s=5.0) == {"a": 5.5, "c": 7.5}
    assert decide_lost_nodes({}, awake_s=99.0, timeout_s=5.0) == {}


def test_a_watcher_that_slept_loses_nobody() -> None:
    """A minute in which the watcher was held up, and beats wait to be taken in."""
    clock = AwakeClock(0.25)
    renewed_s = {"a": clock.tick(0.0)}
    assert decide_lost_nodes(renewed_s, clock.tick(60.0), timeout_s=5.0) == {}


def test_a_node_is_cut_off_when_the_coordinators_machine_is_silent_for_a_lease() -> None:
    assert not decide_cut_off("silent", silent_s=5.0, timeout_s=5.0)
    assert decide_cut_off("silent", silent_s=5.1, timeout_s=5.0)


def test_a_slow_coordinator_cuts_off_nobody() -> None:
    assert not decide_cut_off("answers", silent_s=1e6, timeout_s=5.0)


def test_a_coordinator_that_has_ended_is_waited_for_longer_than_an_agent_outlives_it() -> None:
    assert not decide_cut_off("refuses", silent_s=30.0, timeout_s=5.0)
    assert decide_cut_off("refuses", silent_s=60.0, timeout_s=5.0)


def test_an_agent_that_ended_three_times_within_a_minute_is_not_started_again() -> None:
    assert not decide_hopeless([0.0])
    assert not decide_hopeless([0.0, 1.0])
    assert decide_hopeless([0.0, 1.0, 60.0])
    assert not decide_hopeless([0.0, 1.0, 60.1])
    assert not decide_hopeless([0.0, 100.0, 101.0, 170.0])
    assert decide_hopeless([0.0, 100.0, 101.0, 102.0])
