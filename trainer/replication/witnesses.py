"""One lane that several replicas compute, now and then: the only thing that shows a gradient that
is wrong before it is summed, for the sum is the same on all replicas. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WITNESSES = 2
"""Most that compute a lane beside the replica that has it: with that one they make a majority."""

_MULTIPLIER, _MASK = 0xBF58476D1CE4E5B9, 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A lane that is computed more than once in a step."""

    lane: int
    """It."""
    owner: int
    """Position of the replica that has it."""
    witnesses: tuple[int, ...]
    """Positions of those that compute it as well, and do without the result."""

    def number_of(self, position: int) -> int | None:
        """Which of the witnesses a replica is."""
        return self.witnesses.index(position) if position in self.witnesses else None


def plan_witnesses(
    lanes: Sequence[Sequence[int]], *, seed: int, step: int, every: int | None
) -> Drawn | None:
    """The lane that is drawn in a step, and who computes it; the same on all workers.

    Each lane is as likely as another, and who witnesses it follows its owner in the roster.

    Args:
        lanes: of each replica, by position. One without lanes has no state perhaps.
        seed: of the run.
        step: the current one.
        every: steps from one draw to the next; None: there is none.
    """
    able = [position for position, held in enumerate(lanes) if held]
    if not every or (step + 1) % every or len(able) < 2:
        return None
    total = sum(map(len, lanes))
    lane = _mixed(seed, step) % total
    owner = next(position for position in able if lane in lanes[position])
    at = able.index(owner)
    others = [*able[at + 1 :], *able[:at]]
    return Drawn(lane=lane, owner=owner, witnesses=tuple(others[:WITNESSES]))


def _mixed(*parts: int) -> int:
    state = 1
    for part in parts:
        state = ((state ^ (part & _MASK)) * _MULTIPLIER + 1) & _MASK
        state ^= state >> 31
    return state
