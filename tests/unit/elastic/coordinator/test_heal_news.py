"""A newcomer that does not get the state is ended in the end, with no word against its machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from elastic.coordinator.heal_news import HealNews
from elastic.protocol import events
from elastic.protocol.causes import CRASH, entry_of
from elastic.protocol.roster import Heal
from tests.support.coordinator_desk import CoordinatorDesk

TOO_SLOW = "the state comes too slowly: 5 of 80 bytes in 9.0 s"


class Desk(CoordinatorDesk):
    """The one that heals are told to: b gets the state from a, the only one that has it."""

    def __init__(self, root: Path, *, each: int = 1) -> None:
        super().__init__(root, each=each)
        self.news = HealNews(self.membership, self.dispatcher, self.workers, self.records)

    async def fail(self, times: int) -> None:
        membership = self.membership
        for _ in range(times):
            roster = membership.roster
            (newcomer,) = (r for r in roster.replicas if r.workers == ("b",))
            at = roster.replicas.index(newcomer)
            heal = Heal(position=at, source=(at + 1) % len(roster.replicas), ranks=(0,))
            membership.heals.resume((heal,), roster, {"b": newcomer.formed}, ())
            await self.news.failed("b", roster.generation, TOO_SLOW)
        await asyncio.sleep(0)  # the agents are told aside


def test_what_is_told_of_an_earlier_roster_counts_for_nothing(tmp_path: Path) -> None:
    """Whoever told it to a coordinator that is lost says so again, and may be in another heal."""
    desk = Desk(tmp_path)

    async def scene() -> None:
        await desk.fail(1)
        before = desk.membership.roster.generation - 1
        await desk.news.failed("b", before, TOO_SLOW)
        assert len(desk.happened(events.HealFailed)) == 1
        await desk.news.caught_up("b", before, 80, 9.0, 1)
        assert desk.membership.heals.behind
        await desk.news.caught_up("b", before + 1, 80, 9.0, 1)
        assert not desk.membership.heals.behind

    asyncio.run(scene())


def test_a_failure_that_is_told_once_more_is_written_down_once(tmp_path: Path) -> None:
    """Ray brings a call once more where it does not know that it came. The next heal's counts."""
    desk = Desk(tmp_path)

    async def scene() -> None:
        await desk.fail(1)
        await desk.news.failed("b", desk.membership.roster.generation, TOO_SLOW)
        assert len(desk.happened(events.HealFailed)) == 1
        await desk.fail(1)
        assert len(desk.happened(events.HealFailed)) == 2

    asyncio.run(scene())


def test_of_one_that_is_lost_once_it_has_the_state_nothing_is_kept(tmp_path: Path) -> None:
    """Its replica was not whole yet, and never will be."""
    desk = Desk(tmp_path, each=2)
    roster = desk.membership.roster
    (newcomer,) = (r for r in roster.replicas if r.workers == ("c", "d"))
    at = roster.replicas.index(newcomer)
    heal = Heal(position=at, source=(at + 1) % len(roster.replicas), ranks=(0, 1))
    behind = dict.fromkeys("cd", newcomer.formed)
    desk.membership.heals.resume((heal,), roster, behind, ())

    async def scene() -> None:
        await desk.news.caught_up("c", roster.generation, 80, 9.0, 1)
        await desk.workers.lose("c", CRASH, "its process ended")
        await desk.news.caught_up("d", roster.generation, 70, 8.0, 1)

    asyncio.run(scene())
    assert desk.news.received == {"d": (70, 8.0, 1)}


def test_after_three_failures_the_newcomer_is_ended_and_its_machine_is_not_suspect(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    asyncio.run(desk.fail(2))
    assert desk.happened(events.WorkerLost) == desk.agents.killed == []
    asyncio.run(desk.fail(1))
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.detail) == ("b", f"3 heals failed: {TOO_SLOW}")
    assert desk.agents.killed == ["b"]
    assert entry_of(lost.cause).against_machine == 0
    assert len(desk.happened(events.HealFailed)) == 3
