"""No worker joins unwatched, however often its join comes; since when it is there is known."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from elastic.coordinator import workers as module
from elastic.coordinator.workers import Workers
from elastic.protocol.causes import CRASH
from elastic.protocol.messages import Identity
from elastic.protocol.rpc import Remote
from tests.support.coordinator_desk import Agents, CoordinatorDesk

PATIENCE_S = 30.0


class OneAgent(Agents):
    """Is there already, and watches a worker when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        await asyncio.Event().wait()

    def start(self, node: str, coordinator: Any) -> None: ...

    async def watch(self, identity: Identity) -> None:
        await self.answer


@pytest.fixture(autouse=True)
def no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_handle", lambda: Remote(None))


def start(root: Path) -> tuple[OneAgent, Workers]:
    agent = OneAgent()
    workers = CoordinatorDesk(root, agents=agent).workers
    workers.watch(Identity(worker="new", rank=3, node="N", pid=7))
    return agent, workers


def test_a_join_that_comes_once_more_waits_as_the_first_does(tmp_path: Path) -> None:
    """So it does where the first is given up meanwhile."""

    async def run() -> None:
        agent, workers = start(tmp_path)
        first, second = (asyncio.create_task(workers.until_watched("new")) for _ in range(2))
        await asyncio.sleep(0)
        assert not first.done() and not second.done()
        first.cancel()
        await asyncio.wait([first], timeout=PATIENCE_S)
        third = asyncio.create_task(workers.until_watched("new"))
        await asyncio.sleep(0)
        assert not second.done() and not third.done()
        agent.answer.set_result(None)
        await asyncio.wait_for(asyncio.gather(second, third), PATIENCE_S)

    asyncio.run(run())


def test_no_join_passes_where_the_watch_has_failed(tmp_path: Path) -> None:
    async def run() -> None:
        agent, workers = start(tmp_path)
        agent.answer.set_exception(RayError("the agent is gone"))
        for _ in range(2):
            with pytest.raises(RayError):
                await asyncio.wait_for(workers.until_watched("new"), PATIENCE_S)

    asyncio.run(run())


def test_for_how_long_one_was_there_is_known_when_it_has_ended(tmp_path: Path) -> None:
    """It counts from its hello: what it imported before took its time."""

    async def run() -> Workers:
        agent, workers = start(tmp_path)
        agent.answer.set_result(None)
        await workers.until_watched("new")
        await workers.lose("new", CRASH, "its process ended")
        return workers

    begun_s = time.monotonic()
    workers = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    there_s, *others = workers.there_s([("N", 7), ("N", 8), ("M", 7)], begun_s + 100.0)
    assert others == [None, None], "they never said hello"
    assert there_s is not None and there_s <= 100.0 < there_s + time.monotonic() - begun_s
