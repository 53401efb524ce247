"""Questions that a process should answer at once: does its event loop still turn? Pure.

A loop that computes answers late, and one answer may be lost on the way. So one that is missed says
nothing yet; several in a row do.
"""

from __future__ import annotations

from typing import Literal

ANSWER_S = 5.0
"""From one question to the next, and how long an answer may take: several times what the longest
regroup computes."""
MOST_UNANSWERED = 3
"""Questions in a row without an answer that show that the loop is stuck."""

Next = Literal["ask", "wait", "stuck"]
"""What follows."""


def decide_next(unanswered: int, since_s: float) -> Next:
    """What to do now.

    Args:
        unanswered: questions in a row without an answer, up to the latest.
        since_s: since that was asked, on the asker's `AwakeClock`: time in which the asker itself
            was held up blames nobody.
    """
    if since_s < ANSWER_S:
        return "wait"
    return "ask" if unanswered < MOST_UNANSWERED else "stuck"
