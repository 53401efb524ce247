"""A checkpoint is wanted once all that is left of the state is on machines that will go."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from elastic.protocol.causes import CRASH
from tests.support.coordinator_desk import CoordinatorDesk


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)
    gc.enable()  # the dispatcher puts it off for longer than a loop here lasts


def test_a_loss_that_makes_them_the_last_asks_as_a_notice_does(tmp_path: Path) -> None:
    desk = CoordinatorDesk(tmp_path)

    async def scene() -> None:
        desk.workers.retire(["a"], dismiss=False)
        await desk.workers.lose("b", CRASH, "its process ended")
        assert not desk.workers.take_save_wish(), "c stays"
        await desk.workers.lose("c", CRASH, "its process ended")
        assert desk.workers.take_save_wish()
        assert not desk.workers.take_save_wish(), "once is enough"

    play(scene())


def test_it_is_asked_for_again_where_one_who_saved_is_lost(tmp_path: Path) -> None:
    desk = CoordinatorDesk(tmp_path, spares=["d"])

    async def scene() -> None:
        desk.workers.retire(["a", "b", "c"], dismiss=False)
        assert desk.workers.take_save_wish() and not desk.workers.take_save_wish()
        await desk.workers.lose("d", CRASH, "its process ended")
        assert not desk.workers.take_save_wish(), "it had no part of it"
        await desk.workers.lose("c", CRASH, "its process ended")
        assert desk.workers.take_save_wish()

    play(scene())
