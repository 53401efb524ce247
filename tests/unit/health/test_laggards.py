from __future__ import annotations

import pytest

from health.laggards import Position, find_stuck

TIMEOUT_S = 10.0


def at(phase: str, in_phase_s: float) -> Position:
    return Position(phase=phase, in_phase_s=in_phase_s, waits=phase == "reduce")


@pytest.mark.parametrize(
    ("positions", "stuck", "left_s"),
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
def test_who_is_stuck(
    positions: dict[str, Position | None], stuck: list[str], left_s: float
) -> None:
    assert find_stuck(positions, TIMEOUT_S) == (stuck, left_s)
