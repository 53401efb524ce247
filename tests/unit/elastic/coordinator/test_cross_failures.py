"""Whose words are written down where a group across replicas fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

from elastic.coordinator.cross_failures import CrossFailures
from elastic.protocol import events
from elastic.protocol.messages import Identity
from tests.support.coordinator_desk import CoordinatorDesk

MOST = 8
"""Nodes of a roster that are written down."""


class Desk(CoordinatorDesk):
    """The one that failures are told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.failures = CrossFailures(self.membership, self.dispatcher, self.records)

    async def hear(self, *told: tuple[str | None, int]) -> None:
        for worker, generation in told:
            await self.failures.take(generation, f"reset, says {worker}", worker)

    def noted(self) -> list[tuple[str | None, str | None, str]]:
        return [(e.worker, e.node, e.reason) for e in self.happened(events.CrossGroupLost)]


def test_each_machine_that_tells_is_written_down_and_the_first_has_all_called(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    desk.membership.members["b2"] = Identity(worker="b2", rank=9, node="B", pid=9)
    asyncio.run(desk.hear(("b", 1), ("b2", 1), ("c", 1), ("b", 1), ("gone", 1), ("a", 2)))
    assert desk.noted() == [("b", "B", "reset, says b"), ("c", "C", "reset, says c")]
    assert len(desk.happened(events.RegroupCalled)) == 1
    assert desk.membership.call == "fault"


def test_a_standstill_that_nobody_tells_of_is_written_down_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    asyncio.run(desk.hear((None, 1), (None, 1), ("a", 1)))
    assert [worker for worker, _, _ in desk.noted()] == [None, "a"]


def test_of_many_machines_some_are_written_down(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    many = [f"w{rank}" for rank in range(2 * MOST)]
    for rank, worker in enumerate(many):
        identity = Identity(worker=worker, rank=rank, node=f"n{rank}", pid=rank)
        desk.membership.members[worker] = identity
    asyncio.run(desk.hear(*((worker, 1) for worker in many)))
    assert [worker for worker, _, _ in desk.noted()] == many[:MOST]
