"""Fires injected faults in a worker, where it comes to their places.

The coordinator is asked first: it lets each fault fire once, and writes it down before it does.
"""

from __future__ import annotations

import os
import signal

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.faults import HARMLESS, InjectedError, flip_bit
from elastic.protocol.job import Job
from trainer.engine.engine import Engine
from trainer.loop.phases import Phase


class Injection:
    """Hits this worker where an injected fault is placed.

    Args:
        job: holds the faults.
        worker: this worker's name.
    """

    def __init__(self, job: Job, worker: str) -> None:
        self._job, self._worker = job, worker
        self.slot: int | None = None
        """The number of this worker's slot; None as long as it has had none."""
        self.engine: Engine | None = None
        """What a fault may disturb."""
        self._glitched = False
        """A bit is changed, and will be changed back after this micro-batch."""

    def enter(self, step: int, phase: Phase) -> None:
        """The worker enters `phase` of `step`: fires what is due there.

        Raises:
            InjectedError: a `raise` fault.
        """
        if self.slot is None:
            return
        if self._glitched and phase != "backward":
            self._glitched = False
            self._flip()
        for index, fault in enumerate(self._job.faults):
            if fault.due(step, phase) and self.slot in fault.targets(self._job.slots):
                self._fire(index, step)

    def _fire(self, index: int, step: int) -> None:
        fault = self._job.faults[index]
        assert self.slot is not None
        claim = CoordinatorApi.claim_fault
        if not self._job.coordinator.call(claim, index, self.slot, step, self._worker):
            return
        if fault.kind == "raise":
            raise InjectedError(str(fault))
        if fault.kind in HARMLESS:
            self._glitched = fault.kind == "glitch"
            self._flip()
        elif fault.kind == "loop":
            while True:
                pass
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _flip(self) -> None:
        assert self.engine is not None
        flip_bit(self.engine)
