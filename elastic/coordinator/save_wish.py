"""Checkpoints out of turn: machines will go, or a fault came at the wrong moment."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic.membership.machine import Membership
from elastic.protocol.events import Event, RegroupDone

_FIRST_PAUSE_S, _MOST_PAUSE_S = 30.0, 1800.0
"""After a save that failed, before the last copies ask again: each time twice as long."""


class SaveWish:
    """Says whether a checkpoint is wanted: the machines that will go hold all there is of the
    state, or a regroup has cut one off. It is until one is committed of that step or a later one,
    whatever becomes of those that are begun.

    Args:
        membership: knows who has state, and what is committed.
        now_s: a clock that does not jump, in seconds.
    """

    def __init__(self, membership: Membership, now_s: Callable[[], float] = time.monotonic) -> None:
        self._membership, self._now_s = membership, now_s
        self._last_copies: int | None = None
        """Steps of the run when all that is left of the state came to be on machines that will go;
        None: it is not."""
        self._cut_off: int | None = None
        """Step of a checkpoint that a regroup has cut off."""
        self._pause_s, self._again_s = _FIRST_PAUSE_S, 0.0

    def wanted(self) -> bool:
        """Asked with each answer to the lead."""
        progress = self._membership.progress
        if not self._membership.last_copies_go:
            self._last_copies = None
        elif self._last_copies is None:
            self._last_copies = progress.reached
        asked = (self._last_copies, self._cut_off)
        if not any(step is not None and progress.restore_step < step for step in asked):
            self._pause_s, self._again_s = _FIRST_PAUSE_S, 0.0
            return False
        return self._now_s() >= self._again_s

    def hear(self, event: Event) -> None:
        """Of all that happens: a regroup may have cut a checkpoint off; once the run has gone back
        nothing of before is wanted any more."""
        if not isinstance(event, RegroupDone):
            return
        if event.save_cut_off:
            self._cut_off = event.step
        elif event.outcome in ("start", "restore"):
            self._cut_off = self._last_copies = None

    def failed(self, step: int) -> None:
        """A save of `step` could not be written or committed, and may have left its parts in the
        store; told once, however many wrote it. What was to make up for one that was cut off has
        the next one that is due in its place; the last copies wait."""
        if self._cut_off is not None and step > self._cut_off:
            self._cut_off = None
        self._again_s = self._now_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
