"""The coordinator's part in injected faults (`faults.py`): it says which fires when."""

from __future__ import annotations

import signal
import time

from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.faults import FaultPlan

TOGETHER_S = 5.0
"""How long an injected fault waits for the other workers that it is to hit at the same time."""


class Injections:
    """Lets each injected fault fire once, and hits together who is to be hit together.

    Args:
        plan: the faults.
        membership: knows the generation, and the spares.
        dispatcher: workers that a fault hits together wait there for each other.
        workers: spares are hit through it.
        records: where it is written down.
    """

    def __init__(
        self,
        plan: FaultPlan,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        records: RunLog,
    ) -> None:
        self._plan, self._membership = plan, membership
        self._dispatcher, self._workers, self._records = dispatcher, workers, records
        self._hit: set[str] = set()

    async def claim(self, index: int, slot: int, step: int, worker: str) -> bool:
        """Whether injected fault `index` hits the worker in `slot` now. Workers that a fault hits
        together get their answers together."""
        generation = self._membership.progress.generation
        if not self._plan.claim(index, slot, generation, settled=self._membership.settled):
            return False
        self._note(str(self._plan.faults[index]), step, worker)
        await self._dispatcher.tell()
        await self._dispatcher.until(lambda: self._plan.fired(index), TOGETHER_S)
        return True

    def hit_spares(self) -> None:
        """Hits the spares whose faults are due with the steps recorded so far. Each hits another
        one: what became of the first may not be known yet."""
        recorded = self._membership.progress.recorded
        for fault in self._plan.claim_for_spares(recorded):
            spare = next((s for s in self._membership.places.idle if s not in self._hit), None)
            if spare is not None:
                self._hit.add(spare)
                self._note(str(fault), recorded - 1, spare)
                number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
                self._workers.signal(spare, number)

    def _note(self, fault: str, step: int, worker: str) -> None:
        self._records.note(
            events.FaultFired(time=time.time(), fault=fault, step=step, worker=worker)
        )
