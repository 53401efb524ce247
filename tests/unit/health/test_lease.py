from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.lease import (
    AwakeClock,
    Reach,
    decide_cut_off,
    decide_gone,
    decide_hopeless,
    decide_lost_nodes,
)


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
    assert not decide_cut_off("silent", gone=False, silent_s=5.0, timeout_s=5.0)
    assert decide_cut_off("silent", gone=False, silent_s=5.1, timeout_s=5.0)


@pytest.mark.parametrize("gone", [False, True])
def test_a_slow_coordinator_cuts_off_nobody(gone: bool) -> None:
    assert not decide_cut_off("answers", gone, silent_s=1e6, timeout_s=5.0)


@pytest.mark.parametrize(
    ("reach", "gone"), [("refuses", False), ("refuses", True), ("silent", True)]
)
def test_a_coordinator_that_has_ended_is_waited_for_longer_than_an_agent_outlives_it(
    reach: Reach, gone: bool
) -> None:
    """Ray gives a machine up after some 65 s, and needs 20 s more for its head's."""
    assert not decide_cut_off(reach, gone, silent_s=90.0, timeout_s=5.0)
    assert decide_cut_off(reach, gone, silent_s=126.0, timeout_s=5.0)


@pytest.mark.parametrize(
    ("asked", "silences_s", "gone"),
    [
        (0, [], False),  # nobody to ask
        (1, [], False),
        (1, [4.5], True),
        (1, [1.0], False),  # the coordinator lives, and has written this node off
        (2, [5.0], False),
        (2, [5.0, 4.5], True),
        (5, [5.0, 4.5], False),  # cut off together with a few
        (5, [5.0, 4.5, 6.0], True),
        (5, [5.0, 4.5, 6.0, 2.0], False),
    ],
)
def test_the_coordinators_machine_is_gone_where_most_others_answer_and_none_hears_it(
    asked: int, silences_s: list[float], gone: bool
) -> None:
    assert decide_gone(asked, silences_s, timeout_s=5.0) == gone


def test_an_agent_that_ended_three_times_within_a_minute_is_not_started_again() -> None:
    assert not decide_hopeless([0.0])
    assert not decide_hopeless([0.0, 1.0])
    assert decide_hopeless([0.0, 1.0, 60.0])
    assert not decide_hopeless([0.0, 1.0, 60.1])
    assert not decide_hopeless([0.0, 100.0, 101.0, 170.0])
    assert decide_hopeless([0.0, 100.0, 101.0, 102.0])
