"""Leases: a node counts as there for as long as it says so in time. Pure.

The node's agent renews its lease at the coordinator. Each side measures for itself how long no
renewal came through, and each on a clock that stands still while it was itself held up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Reach = Literal["answers", "refuses", "silent"]
"""What becomes of an attempt to connect to the coordinator's process: its kernel accepts, also
where the process is only slow; it refuses, as the process has ended; nothing comes back."""

_ENDING_S = 120.0
"""How long an agent may outlive its coordinator at the most. Ray ends it within 5 s of the end of
the coordinator's process; a machine that says nothing any more it gives up after 55 to 70 s; its
own head may be away for 60 s, and needs 20 s then."""

_MOST_ENDS, _ENDS_WITHIN_S = 3, 60.0
"""An agent that has ended so often within so many seconds is not started again."""


class AwakeClock:
    """Time in which its owner was awake to see things happen.

    The owner ticks it about every `interval_s`. Where a tick comes much later, the owner was not
    scheduled (machine overloaded or suspended, its own thread busy), and could not have seen what
    it was waiting for: of such a gap, twice the interval counts.

    Args:
        interval_s: how often the owner means to tick it.
    """

    def __init__(self, interval_s: float) -> None:
        self._most_s = 2 * interval_s
        self._last_s: float | None = None
        self.awake_s = 0.0
        """Time awake up to the latest tick."""

    def tick(self, now_s: float) -> float:
        """Advances to `now_s` of the monotonic clock. Returns the time awake."""
        if self._last_s is not None:
            self.awake_s += min(now_s - self._last_s, self._most_s)
        self._last_s = now_s
        return self.awake_s


def decide_lost_nodes(
    renewed_s: Mapping[str, float], awake_s: float, timeout_s: float
) -> dict[str, float]:
    """Nodes whose lease has run out, with the seconds since its last renewal.

    Args:
        renewed_s: node -> when its lease was renewed last.
        awake_s: now. Both are times awake of the one who decides.
        timeout_s: how long a lease lasts.
    """
    ages = {node: awake_s - last_s for node, last_s in renewed_s.items()}
    return {node: age_s for node, age_s in ages.items() if age_s > timeout_s}


def decide_hopeless(ended_s: Sequence[float]) -> bool:
    """Whether a node's agents end so often that no further one is started there.

    Args:
        ended_s: when its agents have ended so far, in order, on a clock that never goes back.
    """
    last = ended_s[-_MOST_ENDS:]
    return len(last) == _MOST_ENDS and last[-1] - last[0] <= _ENDS_WITHIN_S


def decide_gone(asked: int, silences_s: Sequence[float], timeout_s: float) -> bool:
    """Whether the coordinator's machine is gone, by the word of other nodes' agents: most of those
    that were asked answer, so this node is not cut off from the others; and none of them hears the
    coordinator, which would mean that it lives and has written this node off.

    Where nobody can be asked, the node counts as cut off.

    Args:
        asked: how many.
        silences_s: of each that has answered, the seconds since it heard the coordinator.
        timeout_s: how long a lease lasts.
    """
    return 2 * len(silences_s) > asked and all(s > timeout_s / 2 for s in silences_s)


def decide_cut_off(reach: Reach, gone: bool, silent_s: float, timeout_s: float) -> bool:
    """Whether a node that heard nothing for `silent_s` is cut off, and has to end its workers.

    A coordinator whose process has ended, or whose machine is gone, is started anew and takes the
    run up from the workers: to end them then would lose what it is to take up. Another agent
    watches them by and by; until then this one waits. Should it have to for longer than it can live
    on, somebody on the way refuses in the coordinator's place, or the network is in two halves and
    the coordinator in the other one.

    Args:
        reach: what an attempt to connect has shown now.
        gone: whether the coordinator's machine is, by what others say (`decide_gone`).
        silent_s: time awake since the last renewal.
        timeout_s: how long a lease lasts.
    """
    if reach == "refuses" or (reach == "silent" and gone):
        return silent_s > timeout_s + _ENDING_S
    return reach == "silent" and silent_s > timeout_s
