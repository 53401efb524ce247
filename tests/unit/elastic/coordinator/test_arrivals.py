"""How long the start waits for workers that have started, and what becomes of one that does not
join."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator import arrivals as module
from elastic.coordinator.arrivals import Arrivals
from elastic.protocol import events
from elastic.protocol.causes import CRASH
from elastic.protocol.messages import Answer, Identity, Report, Stop
from elastic.reporting.event_log import read_events
from elastic.reporting.report import build_report
from tests.support.coordinator_desk import CoordinatorDesk

PATIENCE_S = 0.05


def newcomer(name: str, node: str = "N") -> Identity:
    return Identity(worker=name, rank=7, node=node, pid=7)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CoordinatorDesk:
    desk = CoordinatorDesk(tmp_path)

    def watch(identity: Identity) -> None:
        desk.workers.started[identity.worker] = identity

    monkeypatch.setattr(desk.workers, "watch", watch)
    monkeypatch.setattr(module, "_LEAST_S", 3 * PATIENCE_S)
    return desk


def arrivals_of(desk: CoordinatorDesk) -> Arrivals:
    return Arrivals(desk.membership, desk.dispatcher, desk.workers, desk.records, PATIENCE_S)


def test_one_that_does_not_join_is_ended(desk: CoordinatorDesk) -> None:
    """In a compilation or a first look at its data that hangs: it is in nobody's collective."""

    async def run() -> None:
        arrivals = arrivals_of(desk)
        for name in ("joins", "hangs", "is lost"):
            await arrivals.hello(newcomer(name))
        await arrivals.hello(newcomer("works"), joins=False)
        await arrivals.joined("joins")
        await desk.workers.lose("is lost", CRASH, "its process ended")
        await asyncio.sleep(0)
        while not desk.agents.killed or arrivals.coming:  # of ten thousand losses none is kept
            await asyncio.sleep(PATIENCE_S)
        await asyncio.sleep(PATIENCE_S)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert desk.agents.killed == ["hangs"]
    lost = {event.worker: event.cause for event in desk.happened(events.WorkerLost)}
    assert lost == {"hangs": "hang", "is lost": "crash"}


def test_a_hello_that_comes_once_more_changes_nothing(desk: CoordinatorDesk) -> None:
    """Its answer was lost. Late, it may find its worker at work, or written off: nobody waits for
    the one, and the other is not lost anew."""

    async def run() -> Answer:
        arrivals = arrivals_of(desk)
        await arrivals.hello(newcomer("works"))
        await arrivals.joined("works")
        await arrivals.hello(newcomer("works"))
        await arrivals.hello(newcomer("hangs"))
        while not desk.agents.killed:
            await asyncio.sleep(PATIENCE_S)
        await arrivals.hello(newcomer("hangs"))
        assert arrivals.hellos == 2
        answer = await desk.dispatcher.join(Report(identity=newcomer("hangs")))
        await desk.workers.lose("hangs", CRASH, "its process ended")
        return answer

    answer = asyncio.run(asyncio.wait_for(run(), 30))
    assert isinstance(answer, Stop) and "written off" in str(answer.error)
    assert desk.agents.killed == ["hangs"]
    assert [event.worker for event in desk.happened(events.WorkerJoined)] == ["works", "hangs"]
    assert [event.worker for event in desk.happened(events.WorkerLost)] == ["hangs"]


def test_the_start_waits_for_those_who_have_started(
    desk: CoordinatorDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may compile for longer than it waits for others."""
    monkeypatch.setattr(module, "_LEAST_S", 1000.0)
    formations: Any = desk.membership.formations
    formations.begun = 0
    begun = asyncio.Event()
    monkeypatch.setattr(formations, "wait_no_longer", begun.set)

    async def run() -> None:
        arrivals = arrivals_of(desk)
        await arrivals.hello(newcomer("compiles"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(begun.wait(), 6 * PATIENCE_S)
        await arrivals.joined("compiles")
        await asyncio.wait_for(begun.wait(), 30)

    asyncio.run(run())


@pytest.mark.parametrize("joins", [True, False])
def test_a_machine_is_loaded_when_all_who_have_started_there_have_joined(
    desk: CoordinatorDesk, joins: bool
) -> None:
    async def run() -> None:
        arrivals = arrivals_of(desk)
        for name, node in [("first", "N"), ("second", "N"), ("elsewhere", "M")]:
            await arrivals.hello(newcomer(name, node))
        await arrivals.joined("first")
        waiting = asyncio.ensure_future(arrivals.until_here("N"))
        await asyncio.sleep(0)
        assert not waiting.done()
        if joins:
            await arrivals.joined("second")
        else:
            await desk.workers.lose("second", CRASH, "its process ended")
        await asyncio.wait_for(waiting, 30)

    asyncio.run(run())


def test_one_that_hangs_before_its_hello_is_in_the_records_once(desk: CoordinatorDesk) -> None:
    """It has no name, and costs no budget. One whose hello came in the last moment has both."""

    async def run() -> None:
        await arrivals_of(desk).hello(newcomer("came", "M"))
        for _ in range(2):
            desk.workers.lose_silent([("N", 7), ("M", 7)], 600.0)

    asyncio.run(run())
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.node, lost.pid, lost.slot, lost.cause) == ("N", 7, None, "hang")
    assert lost.worker == "silent-N-7" and "not said hello 600 s after" in lost.detail
    assert all(spent == 0 for spent, _ in desk.workers.spent().values())
    report = build_report([desk.config.started, *read_events(desk.paths.events)], [])
    assert [one.cause for one in report.incidents] == ["hang"]
