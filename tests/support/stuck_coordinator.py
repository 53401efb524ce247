"""Event loops that are stuck: no signal has stopped the process, and it answers nothing."""

from __future__ import annotations

import os
import threading
import time

from elastic.coordinator.actor import Coordinator
from elastic.protocol.events import Event, StepRecord
from elastic.protocol.messages import Recorded
from elastic.ray_compat.cluster import started_anew

STUCK_AT = 5
"""The step whose record is the last."""


class StuckCoordinator(Coordinator):
    """A coordinator whose event loop hangs once; the one that is started in its place does not."""

    async def record(self, steps: list[StepRecord], happened: list[Event]) -> Recorded:
        """See CoordinatorApi."""
        answer = await super().record(steps, happened)
        if any(record.step >= STUCK_AT for record in steps) and not started_anew():
            threading.Event().wait()
        return answer


class Loop:
    """Answers the watch, and is held up on its event loop."""

    async def awake(self) -> None:
        """What the watch asks."""

    async def pid(self) -> int:
        """Its process."""
        return os.getpid()

    async def compute(self, seconds: float) -> None:
        """Lets nothing else run."""
        time.sleep(seconds)

    async def hang(self) -> None:
        """Never ends."""
        threading.Event().wait()
