from __future__ import annotations

import pytest

from health.laggards import Position, patience_left_s


@pytest.mark.parametrize(
    ("position", "left_s"),
    [
        (None, 0.0),  # nobody can tell: its node's agent is gone
        (Position(phase="evaluation", in_phase_s=0.5), 9.5),
        (Position(phase="backward", in_phase_s=10.0), 0.0),
        (Position(phase="backward", in_phase_s=600.0), 0.0),
    ],
)
def test_who_enters_new_phases_is_waited_for(position: Position | None, left_s: float) -> None:
    assert patience_left_s(position, 10.0) == left_s
