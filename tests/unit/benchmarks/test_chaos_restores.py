"""A restore that the soak finds needless was."""

from __future__ import annotations

import pytest

from benchmarks._chaos_restores import find_needless_restores
from elastic.protocol.events import Event, ReplicaHealed
from tests.support.chaos_events import committed, forming, lost, roster

BEGIN = [
    forming(1, 0, "a", "b"),
    forming(2, 1, "c", "d"),
    roster(3, 1, "start", {"0": [0], "1": [1]}),
]


@pytest.mark.parametrize(
    ("happened", "found"),
    [
        # One shard is gone in both replicas.
        ([lost(5, "a"), lost(6, "c"), roster(9, 2, "restore", {})], []),
        # The survivors b and c hold both.
        ([lost(5, "a"), lost(6, "d"), roster(9, 2, "restore", {})], [2]),
        # A whole replica lives.
        ([lost(5, "a"), lost(6, "b"), roster(9, 2, "restore", {})], [2]),
        # b took a place in a new replica, which had not healed.
        ([lost(5, "a"), forming(6, 0, "e", "b"), lost(7, "c"), roster(9, 2, "restore", {})], []),
        # As before, but healed: e and d are a whole copy.
        (
            [
                lost(5, "a"),
                forming(6, 0, "e", "b"),
                roster(7, 2, "repeat", {"0": [], "1": [0, 1]}),
                ReplicaHealed(
                    time=8,
                    generation=2,
                    replica=0,
                    source=1,
                    bytes=1,
                    seconds=1.0,
                    catch_up_steps=0,
                ),
                lost(8.5, "c"),
                lost(8.6, "b"),
                roster(9, 3, "restore", {}),
            ],
            [3],
        ),
        # b, of the roster before, was as far as c and d when d was lost.
        (
            [
                lost(5, "a"),
                roster(6, 2, "repeat", {"1": [0, 1]}),
                lost(7, "d"),
                forming(8, 0, "b", "c"),
                roster(9, 3, "restore", {}),
            ],
            [3],
        ),
        # A step was committed without b, which it does not have.
        (
            [
                lost(5, "a"),
                roster(6, 3, "repeat", {"1": [0, 1]}),
                lost(12, "d"),
                forming(13, 0, "b", "c"),
                roster(14, 4, "restore", {}),
            ],
            [],
        ),
        # It went on from what was there.
        ([lost(5, "a"), lost(6, "b"), roster(9, 2, "repeat", {"1": [0, 1]})], []),
    ],
)
def test_needless_restores(happened: list[Event], found: list[int]) -> None:
    steps = [committed(4, 1), committed(10, 3)]
    assert find_needless_restores([*BEGIN, *happened], steps, workers=2) == found


def test_a_roster_without_a_commit_may_have_no_state() -> None:
    happened = [lost(5, "a"), lost(6, "b"), roster(9, 2, "restore", {})]
    assert find_needless_restores([*BEGIN, *happened], [], workers=2) == []
