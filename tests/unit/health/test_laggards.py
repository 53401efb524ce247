from __future__ import annotations

import pytest

from health.laggards import find_stuck
from health.progress import Place

TIMEOUT_S = 10.0


def at(phase: str, in_phase_s: float, begun: int = 40) -> Place:
    return Place(
        mark=1,
        phase=phase,
        in_phase_s=in_phase_s,
        bound="pace",
        waits=phase == "reduce",
        collectives=begun,
        longest_s=0.0,
    )


@pytest.mark.parametrize(
    ("places", "stuck", "left_s"),
    [
        ({}, [], 0.0),
        ({"a": None}, ["a"], 0.0),  # its node's agent is gone
        ({"a": at("evaluation", 0.5)}, [], 9.5),
        ({"a": at("backward", 10.0)}, ["a"], 0.0),
        ({"a": at("evaluation", 0.5), "b": at("reduce", 60.0)}, [], 9.5),  # b waits for a
        ({"a": at("backward", 60.0), "b": at("reduce", 60.0)}, ["a"], 0.0),
        ({"a": at("reduce", 60.0), "b": at("reduce", 50.0)}, ["a", "b"], 0.0),
        ({"a": None, "b": at("reduce", 50.0)}, ["a"], 0.0),
    ],
)
def test_who_is_stuck(places: dict[str, Place | None], stuck: list[str], left_s: float) -> None:
    assert find_stuck(places, TIMEOUT_S) == (stuck, left_s)


@pytest.mark.parametrize(
    ("places", "stuck"),
    [
        ({"a": at("forward", 60.0, 41), "b": at("forward", 60.0)}, ["b"]),
        ({"a": at("forward", 60.0), "b": at("forward", 60.0)}, ["a", "b"]),
        ({"a": at("forward", 60.0, 41)}, ["a"]),  # b has come
        ({"a": at("forward", 60.0, 41), "c": at("forward", 60.0)}, ["a", "c"]),
        ({"a": at("before_commit", 60.0, 41), "b": at("reduce", 60.0)}, ["b"]),
        ({"a": at("before_commit", 60.0, 41), "b": at("reduce", 60.0), "c": None}, ["c"]),
        ({"a": at("forward", 60.0, 41), "b": at("regroup", 60.0, 0)}, ["a", "b"]),
        ({"a": at("forward", 60.0, 41), "b": None}, ["a", "b"]),
        ({"a": at("forward", 60.0, 41), "e": at("forward", 60.0)}, ["a", "e"]),  # e is no mate
    ],
)
def test_who_waits_for_a_mate_is_not_stuck(
    places: dict[str, Place | None], stuck: list[str]
) -> None:
    """Of a replica, who has begun more collectives is in one that the mate has yet to enter."""
    found, left_s = find_stuck(places, TIMEOUT_S, replicas=[("a", "b"), ("c", "d")])
    assert (found, left_s) == (stuck, 0.0)
