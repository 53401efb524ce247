"""Machines are looked at before their workers get a place (`elastic/node/preflight.py`).

quick: the first worker of a machine starts ──► its agent starts ──► quick checks, beside all else
       a worker joins for the first time ──► waits for them, BOUND_S at most
full:  all workers of a machine have joined for the first time ──► its agent loads the machine,
       once; they wait for it, LOADED_BOUND_S at most; one that gives no answer is told of
ISOLATE ──► its workers get no slot; the machine is suspect (`suspicions.py`)
anything else ──► an event, and a line of the report
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

from elastic.coordinator.agents import NodeAgents
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
        tier: `HealthConfig.preflight`.
        workers: leave a machine that is isolated.
        agents: load their machines.
        records: where findings are written down.
        until_here: waits until all workers that have started on a machine have joined.
    """

    def __init__(
        self,
        tier: bool | Literal["full"],
        workers: Workers,
        agents: NodeAgents,
        records: RunLog,
        until_here: Callable[[str], Awaitable[None]],
    ) -> None:
        self._until_here = until_here
        self._tier, self._workers, self._agents, self._records = tier, workers, agents, records
        self._checked: dict[str, asyncio.Event] = {}
        self._under_load: dict[str, asyncio.Task[None]] = {}
        self._loaded: set[str] = set()
        """Machines that a coordinator before this one had loaded."""

    def replay(self, happened: Iterable[events.Event]) -> None:
        """Told of all that happened in this start of the run before this coordinator."""
        self._loaded.update(e.node for e in happened if isinstance(e, events.NodeChecked))

    async def until_checked(self, report: Report) -> None:
        """Waits until the machine of a worker that joins was looked at. Who works already, under
        a coordinator that was lost, waits for nothing."""
        if not self._tier or report.built or report.step is not None:
            return
        node = report.identity.node
        if self._tier == "full":
            if node not in self._under_load:
                self._under_load[node] = asyncio.create_task(self._check_under_load(node))
            await asyncio.shield(self._under_load[node])
            return
        checked = self._of(node)
        try:
            await asyncio.wait_for(checked.wait(), BOUND_S)
        except asyncio.TimeoutError:
            checked.set()  # nobody else waits for it

    async def _check_under_load(self, node: str) -> None:
        if node in self._loaded:
            return  # before the coordinator was lost
        await self._until_here(node)  # before they join they may compile
        if self._workers.work_on(node):
            return  # no step must be slowed
        began_s = time.monotonic()
        findings = await self._agents.check_under_load(node)
        await self.take(node, _silent(time.monotonic() - began_s) if findings is None else findings)

    async def take(self, node: str, findings: Sequence[Finding]) -> None:
        """What a machine's checks say."""
        isolated = decide_isolated(findings)
        ills = [one.to_json() for one in findings if one.severity != "OK"]
        if ills or self._tier == "full":
            self._records.note(
                events.NodeChecked(time=time.time(), node=node, findings=ills, isolated=isolated)
            )
        if isolated:
            await self._workers.drain_node(node, None, f"preflight: {isolated}")
        self._of(node).set()

    def _of(self, node: str) -> asyncio.Event:
        return self._checked.setdefault(node, asyncio.Event())


def _silent(waited_s: float) -> list[Finding]:
    """What is told of a machine that did not say what its loads have found."""
    return [
        Finding(
            check="loads",
            result=f"no answer in {waited_s:.0f} s",
            severity="RESET",
            meaning="its workers get places, and nobody knows how it is",
            fix="Look at it with elastic doctor --full, and at its raylet's log",
        )
    ]
