"""The watch over steps that do not come: who keeps the others is ended, also where no step of a new
roster has come yet."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.link_tests import LinkTests
from elastic.coordinator.standstill import StandstillWatch
from elastic.protocol import events
from elastic.protocol.messages import Evidence, Identity
from health.progress import Place
from tests.support.coordinator_desk import CoordinatorDesk

LEAST_S, PATIENCE_S = 0.3, 30.0
WAITS = Place(
    mark=9,
    phase="phase reduce of step 5",
    in_phase_s=5.0,
    in_step=True,
    waits=True,
    collectives=0,
    longest_s=0.0,
)
LOOPS = replace(WAITS, phase="phase forward of step 5", waits=False)


class Agents:
    """Know where the workers are, and find nothing else."""

    def __init__(self, desk: CoordinatorDesk) -> None:
        self._desk = desk

    async def places(self, nodes: Iterable[str]) -> dict[str, Place | None]:
        return {"a": WAITS, "b": LOOPS, "c": WAITS}

    async def evidence(self, identities: Iterable[Identity]) -> dict[str, Evidence]:
        return {}

    async def try_links(self, nodes: Iterable[str], bound_s: float) -> dict[tuple[str, str], int]:
        return {}


class Desk(CoordinatorDesk):
    """The one with a watch, over the rosters of a coordinator that has seen some steps."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        agents: Any = Agents(self)
        self.watch = StandstillWatch(
            LEAST_S,
            PATIENCE_S,
            self.paths.incidents,
            self.membership,
            self.dispatcher,
            self.workers,
            agents,
            LinkTests(self.membership, self.workers, agents, self.records),
            self._cross_lost,
        )

    async def _cross_lost(self, generation: int, reason: str) -> None:
        raise AssertionError(reason)

    def steps(self, count: int) -> list[events.StepRecord]:
        """Of an older roster."""
        return [
            events.StepRecord(
                step=step,
                loss=1.0,
                grad_norm=1.0,
                lr=1.0,
                tokens=1,
                time=time.time() + 0.01 * step,
                generation=0,
                replicas=3,
                sample_digests=[],
            )
            for step in range(count)
        ]

    async def killed(self, within_s: float) -> list[str]:
        """Who has been ended, once somebody is."""
        deadline = time.monotonic() + within_s
        while not self.agents.killed and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        gc.enable()  # the dispatcher puts it off for longer than this loop lasts
        return self.agents.killed


@pytest.mark.parametrize("anew", [False, True], ids=["a new roster", "a new coordinator"])
def test_the_first_step_of_a_roster_may_stand_still(tmp_path: Path, anew: bool) -> None:
    desk = Desk(tmp_path)

    async def run() -> list[str]:
        if anew:
            desk.watch.replay(desk.steps(5))
            desk.watch.begin()
        else:
            desk.watch.committed(desk.steps(5))
        return await desk.killed(PATIENCE_S)

    assert asyncio.run(run()) == ["b"]
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause) == ("b", "hang")
    assert "it keeps the others: for 5.0 s in phase forward of step 5" in lost.detail


def test_before_some_steps_are_known_nobody_is_accused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def run() -> list[str]:
        desk.watch.replay(desk.steps(2))
        desk.watch.begin()
        return await desk.killed(5 * LEAST_S)

    assert asyncio.run(run()) == []
