"""What is being saved from a machine is waited for, whoever writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorUnschedulableError

from elastic.coordinator import uploaders
from elastic.coordinator.uploaders import Uploaders
from elastic.protocol import events
from elastic.protocol.causes import CRASH
from elastic.protocol.messages import Identity
from elastic.protocol.run_paths import RunPaths

WRITER = Identity(worker="w0", rank=0, node="n1", pid=1)
LOST = events.WorkerLost(time=1.0, worker="w0", node="n1", pid=1, slot=None, cause=CRASH, detail="")


class Refused:
    """The uploader of a node that Ray drains."""

    async def send(self, method: Any) -> None:
        raise ActorUnschedulableError("the node is drained")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uploaders:
    monkeypatch.setattr(uploaders, "start_actor", lambda *_, **__: lambda *_: Refused())
    monkeypatch.setattr(uploaders, "own_handle", lambda: None)
    return Uploaders(RunPaths(root=tmp_path), 1)


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20.0))


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(
    "end",
    [
        lambda desk: desk.end_saving("w0"),
        lambda desk: desk.hear_saving(WRITER, False),
        lambda desk: desk.hear(LOST),
    ],
)
def test_a_worker_that_writes_by_itself_is_waited_for(
    desk: Uploaders, end: Callable[[Uploaders], None], asked: bool
) -> None:
    """Whether it has asked for an uploader yet or not."""

    async def story() -> None:
        if asked:
            desk.of("n1")
        desk.hear_saving(WRITER, True)
        desk.hear_saving(Identity(worker="w1", rank=1, node="n2", pid=2), True)
        leaving = asyncio.ensure_future(desk.finish("n1"))
        await desk.finish("n3")
        for _ in range(3):  # as many turns as its uploader's refusal takes
            await asyncio.sleep(0)
        assert not leaving.done()
        end(desk)
        await leaving

    play(story)


def test_nobody_is_waited_for_without_end(desk: Uploaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploaders, "FINISH_S", 0.01)

    async def story() -> None:
        desk.hear_saving(WRITER, True)
        await desk.finish("n1")

    play(story)
