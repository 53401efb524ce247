"""What who was written off hears, should it live."""

from __future__ import annotations

import asyncio
from pathlib import Path

from elastic.protocol.causes import CRASH
from tests.support.coordinator_desk import CoordinatorDesk

PATIENCE_S = 30.0


def test_who_was_written_off_is_called_away_once_and_nothing_is_kept_of_it(tmp_path: Path) -> None:
    """Whatever it has heard before: a run may lose ten thousand."""
    desk = CoordinatorDesk(tmp_path, spares=("s",))
    dispatcher = desk.dispatcher

    async def run() -> None:
        await desk.workers.lose("a", CRASH, "its process ended")
        assert set(dispatcher.signals) == {"b", "c"}
        await desk.workers.lose("b", CRASH, "its process ended")
        assert set(dispatcher.signals) == {"c"}
        for worker, seen in (("a", 0), ("b", 1)):
            call = await asyncio.wait_for(dispatcher.watch(worker, seen), PATIENCE_S)
            assert call is not None and call.serial > seen
            assert (call.kind, call.broken) == ("fault", True)
            again = asyncio.create_task(dispatcher.watch(worker, call.serial))
            await asyncio.sleep(0)
            assert not again.done()
            again.cancel()

    asyncio.run(run())
