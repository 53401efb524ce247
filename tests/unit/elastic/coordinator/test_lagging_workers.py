"""Workers that do not follow a call in time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from elastic.config import HealthConfig
from elastic.coordinator import run_log
from elastic.protocol import events
from elastic.reporting.event_log import EventLog
from health.progress import Place
from tests.support.coordinator_desk import Agents, CoordinatorDesk

PATIENCE_S = 10.0


class Places(Agents):
    """Know where the workers are, too."""

    def __init__(self, waits: dict[str, bool], begun: dict[str, int] | None = None) -> None:
        super().__init__()
        self._waits, self._begun = waits, begun or {}

    async def places(self, nodes: Iterable[str], within_s: float = 0.0) -> dict[str, Place | None]:
        return {
            worker: Place(
                mark=1,
                phase="forward",
                in_phase_s=400.0,
                bound="pace",
                waits=waits,
                collectives=self._begun.get(worker, 0),
                longest_s=0.0,
            )
            for worker, waits in self._waits.items()
        }


def test_who_waited_for_one_that_was_ended_and_does_not_come_either_is_ended(
    tmp_path: Path,
) -> None:
    agents = Places({"a": False, "b": True})
    desk = CoordinatorDesk(tmp_path, health=HealthConfig(regroup_timeout_s=1.0), agents=agents)
    calls = desk.membership.calls
    called = {worker: calls.sign(worker, "fault", broken=True) for worker in ("a", "b")}

    async def run() -> list[list[str]]:
        ended = []
        looking = asyncio.create_task(desk.workers.lose_laggards(called))
        for count in (1, 2):
            while len(agents.killed) < count:
                await asyncio.sleep(0.01)
            ended.append(list(agents.killed))
        await looking
        return ended

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S)) == [["a"], ["a", "b"]]


def test_who_comes_while_the_agents_are_asked_is_spared(tmp_path: Path) -> None:
    """That may take half a minute, for those of another node."""

    class Slow(Places):
        async def places(self, *args: Any) -> dict[str, Place | None]:
            calls.followed("a")
            return await super().places(*args)

    agents = Slow({"a": False, "b": False})
    desk = CoordinatorDesk(tmp_path, health=HealthConfig(regroup_timeout_s=0.2), agents=agents)
    calls = desk.membership.calls
    called = {worker: calls.sign(worker, "fault", broken=True) for worker in ("a", "b")}
    asyncio.run(asyncio.wait_for(desk.workers.lose_laggards(called), PATIENCE_S))
    assert agents.killed == ["b"]


def test_whose_mate_comes_while_the_agents_are_asked_is_spared(tmp_path: Path) -> None:
    """It waited for that one in a collective, and may come now."""
    asked = 0

    class Slow(Places):
        async def places(self, *args: Any) -> dict[str, Place | None]:
            nonlocal asked
            asked += 1
            told = await super().places(*args)
            calls.followed("b" if asked == 1 else "a")
            return told

    agents = Slow({"a": False, "b": False}, {"a": 41, "b": 40})
    health = HealthConfig(regroup_timeout_s=0.2)
    desk = CoordinatorDesk(tmp_path, each=2, health=health, agents=agents)
    calls = desk.membership.calls
    called = {worker: calls.sign(worker, "fault", broken=True) for worker in ("a", "b")}
    asyncio.run(asyncio.wait_for(desk.workers.lose_laggards(called), PATIENCE_S))
    assert agents.killed == [] and asked == 2


def test_time_in_which_the_coordinator_was_held_up_does_not_count(tmp_path: Path) -> None:
    """With the whole run, where that was paused."""

    class HeldUp(Places):
        held, asked = True, 0

        def awake_s(self) -> float:
            self.asked += 1
            return 0.0 if self.held else time.monotonic()

    agents = HeldUp({"a": False})
    desk = CoordinatorDesk(tmp_path, health=HealthConfig(regroup_timeout_s=0.2), agents=agents)
    calls = desk.membership.calls
    called = {"a": calls.sign("a", "fault", broken=True)}

    async def run() -> None:
        looking = asyncio.create_task(desk.workers.lose_laggards(called))
        while agents.asked < 4:  # it has waited for twice the time that they have
            await asyncio.sleep(0.01)
        assert not agents.killed
        agents.held = False
        await looking

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert agents.killed == ["a"]


def test_of_a_replica_that_does_not_come_who_waits_for_its_mate_is_spared(tmp_path: Path) -> None:
    """It comes when that has ended. In another replica the same number says nothing."""
    agents = Places(dict.fromkeys("abc", False), {"a": 41, "b": 40, "c": 41})
    health = HealthConfig(regroup_timeout_s=0.2)
    desk = CoordinatorDesk(tmp_path, each=2, health=health, agents=agents)
    calls = desk.membership.calls
    called = {worker: calls.sign(worker, "fault", broken=True) for worker in "abc"}

    async def run() -> None:
        looking = asyncio.create_task(desk.workers.lose_laggards(called))
        while len(agents.killed) < 2:
            await asyncio.sleep(0.01)
        calls.followed("a")
        await looking

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert agents.killed == ["b", "c"]


def test_nobody_is_ended_while_answers_wait_for_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for what they were answered, and have not heard: it was every worker of the run."""
    agents, answers = Places({"a": False, "b": True}), threading.Event()
    desk = CoordinatorDesk(tmp_path, health=HealthConfig(regroup_timeout_s=0.2), agents=agents)
    monkeypatch.setattr(run_log, "_HELD_BACK_S", 0.1)
    monkeypatch.setattr(EventLog, "sync", lambda log: answers.wait(PATIENCE_S))
    calls = desk.membership.calls
    called = {"a": calls.sign("a", "fault", broken=True)}

    async def run() -> None:
        desk.records.note(events.StopRequested(time=0.0, reason="a record"))
        told = asyncio.create_task(desk.records.durable())
        looking = asyncio.create_task(desk.workers.lose_laggards(called))
        await asyncio.wait([looking], timeout=1.0)
        assert not agents.killed and not told.done()
        answers.set()
        await told
        await looking

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert agents.killed == ["a"], "it has had its time since, and does not come"
