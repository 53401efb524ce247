"""Waiting on the host for what cannot be waited for otherwise, with an ear for calls to leave."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.errors import GroupError

LEFT = "left for a regroup"

_POLL_MIN_S, _POLL_MAX_S = 20e-6, 500e-6


def poll_until(done: Callable[[], bool], leave_now: Callable[[], bool], timeout_s: float) -> None:
    """Polls `done`, ever less often, down to twice a millisecond.

    Raises:
        GroupError: `leave_now` became true, or the time is over.
    """
    pause, deadline = _POLL_MIN_S, time.monotonic() + timeout_s
    while not done():
        if leave_now():
            raise GroupError(LEFT)
        if time.monotonic() > deadline:
            raise GroupError(
                f"a peer did not come within {timeout_s:g} s (health.collective_timeout_s)"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_MAX_S)
