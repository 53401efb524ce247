"""Machines are looked at before their workers get a place (`elastic/node/preflight.py`).

the first worker of a machine starts ──► its agent starts ──► quick checks, beside all else
a worker joins for the first time ──► waits for them, BOUND_S at most
ISOLATE ──► its workers get no slot; the machine is suspect (`suspicions.py`)
anything else ──► an event, and a line of the report
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.doctor.finding import Finding
from elastic.doctor.preflight import decide_isolated
from elastic.protocol import events
from elastic.protocol.messages import Report

BOUND_S = 10.0
"""A machine that has not answered by then is given the benefit of the doubt; what it says later
counts all the same."""


class Preflight:
    """One for the run; on the coordinator's event loop.

    Args:
        on: `HealthConfig.preflight`.
        workers: leave a machine that is isolated.
        records: where findings are written down.
    """

    def __init__(self, on: bool, workers: Workers, records: RunLog) -> None:
        self._on, self._workers, self._records = on, workers, records
        self._checked: dict[str, asyncio.Event] = {}

    async def until_checked(self, report: Report) -> None:
        """Waits until the machine of a worker that joins was looked at. Who works already, under
        a coordinator that was lost, waits for nothing."""
        if not self._on or report.built or report.step is not None:
            return
        checked = self._of(report.identity.node)
        try:
            await asyncio.wait_for(checked.wait(), BOUND_S)
        except asyncio.TimeoutError:
            checked.set()  # nobody else waits for it

    async def take(self, node: str, findings: Sequence[Finding]) -> None:
        """What a machine's checks say."""
        isolated = decide_isolated(findings)
        ills = [one.to_json() for one in findings if one.severity != "OK"]
        if ills:
            self._records.note(
                events.NodeChecked(time=time.time(), node=node, findings=ills, isolated=isolated)
            )
        if isolated:
            await self._workers.drain_node(node, None, f"preflight: {isolated}")
        self._of(node).set()

    def _of(self, node: str) -> asyncio.Event:
        return self._checked.setdefault(node, asyncio.Event())
