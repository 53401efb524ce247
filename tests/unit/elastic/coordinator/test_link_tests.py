"""What the coordinator does about connections that fail: nothing before all have told, and then
those in common are lost, with the evidence. And whose it has tried where a replica stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic.config import HealthConfig
from elastic.coordinator.link_tests import LinkTests
from elastic.coordinator.trouble import Troubles
from elastic.protocol import events
from elastic.protocol.causes import COLLECTIVE, entry_of
from elastic.protocol.messages import Identity, LinkTest
from health.suspects import SUSPECT
from tests.support.coordinator_desk import CoordinatorDesk

ALL_GOOD: dict[str, dict[int, int]] = {"a": {}, "b": {}, "c": {}}
B_FAILS: dict[str, dict[int, int]] = {"a": {1: 64}, "b": {0: 64, 2: 0}, "c": {1: 64}}


class Doors:
    """Agents whose tests find what is told here, one after the other."""

    def __init__(self, *found: Mapping[tuple[str, str], int]) -> None:
        self._found = list(found)
        self.asked: list[list[str]] = []

    async def try_links(self, nodes: Sequence[str], bound_s: float) -> dict[tuple[str, str], int]:
        self.asked.append(list(nodes))
        found = self._found.pop(0)
        return {ends: came for ends, came in found.items() if {*ends} <= {*nodes}}


class Desk(CoordinatorDesk):
    """The one that link tests are told to."""

    def __init__(
        self,
        root: Path,
        *,
        least: int = 1,
        each: int = 1,
        spares: Sequence[str] = (),
        building: bool = False,
        doors: Doors | None = None,
    ) -> None:
        super().__init__(root, least=least, each=each, spares=spares, building=building)
        agents: Any = doors
        self.tests = LinkTests(self.membership, self.workers, agents, self.records)

    async def tell(self, found: dict[str, dict[int, int]], *, generation: int = 1) -> None:
        for worker, short in found.items():
            test = LinkTest(generation=generation, short=short, of_bytes=1000, bound_s=10.0)
            await self.tests.take(worker, test)
        await asyncio.sleep(0)  # the agents are told aside


def test_the_one_in_common_is_lost_with_the_evidence(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    asyncio.run(desk.tell(B_FAILS))
    (tested,), (lost,) = desk.happened(events.LinksTested), desk.happened(events.WorkerLost)
    assert (tested.generation, tested.removed) == (1, ["b"])
    assert tested.failed[0] == "b (node B) to a (node A): 64 of 1,000 bytes in 10 s"
    assert tested.count == len(tested.failed) == 4
    assert (lost.worker, lost.cause, desk.agents.killed) == ("b", "link", ["b"])
    assert "a (node A) to b (node B): 64 of 1,000 bytes in 10 s" in lost.detail
    assert desk.membership.call == "fault"


def test_where_the_other_end_may_be_bad_as_well_the_machine_is_not_suspect_at_once(
    tmp_path: Path,
) -> None:
    """It gets no worker any more all the same: the run must go on."""
    desk = Desk(tmp_path)
    asyncio.run(desk.tell({"a": {1: 64}, "b": {0: 64}, "c": {}}))
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause, desk.workers.shunned_nodes) == ("b", "path", {"B"})
    assert 0 < entry_of(lost.cause).against_machine < SUSPECT


def test_nobody_is_lost_before_all_have_told(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    asyncio.run(desk.tell({"a": B_FAILS["a"], "b": B_FAILS["b"]}))
    asyncio.run(desk.tell({"a": B_FAILS["a"]}))  # to a coordinator started anew, and to this one
    assert desk.happened(events.LinksTested) == []
    asyncio.run(desk.tell(B_FAILS))
    assert [event.worker for event in desk.happened(events.WorkerLost)] == ["b"]


def test_what_is_told_of_another_roster_or_after_a_call_does_not_count(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    asyncio.run(desk.tell(B_FAILS, generation=2))
    desk.membership.cross_lost(1, "reset")
    desk.membership.advance()
    asyncio.run(desk.tell(B_FAILS))
    assert desk.happened(events.LinksTested) == desk.happened(events.WorkerLost) == []


@pytest.mark.parametrize(
    ("found", "least", "told"),
    [(ALL_GOOD, 1, ""), (B_FAILS, 3, "b (node B) to a (node A)")],
)
def test_nobody_is_lost_where_none_fails_or_too_few_would_be_left(
    tmp_path: Path, found: dict[str, dict[int, int]], least: int, told: str
) -> None:
    """It is noted, and is in the error that ends the run by its budget."""
    desk = Desk(tmp_path, least=least)
    asyncio.run(desk.tell(found))
    (tested,) = desk.happened(events.LinksTested)
    assert tested.removed == desk.agents.killed == desk.happened(events.WorkerLost) == []
    assert desk.membership.links_tested is not None
    assert desk.membership.links_tested.startswith(told)
    assert bool(told) == bool(desk.membership.links_tested)


def test_no_worker_on_the_same_machine_takes_its_place(tmp_path: Path) -> None:
    """Neither one that waits there, nor one that starts there later."""
    desk = Desk(tmp_path, spares=["b2", "s"])
    asyncio.run(desk.tell(B_FAILS))
    places = desk.membership.places
    assert "b2" in places.retired and "s" not in places.retired
    desk.workers.started["b3"] = Identity(worker="b3", rank=9, node="B", pid=9)
    desk.workers.pass_over("b3")
    desk.join("b3")
    assert "b3" in places.retired and "b3" not in places.idle
    assert {"a", "c"}.isdisjoint(places.retired)


TO_B = {("A", "B"): 64, ("C", "B"): 0}


def across_nodes(root: Path, doors: Doors) -> Desk:
    """Replicas of two workers: a and b on nodes of their own, and c and d on C."""
    desk = Desk(root, doors=doors)
    desk.lay_out("a b", "c d", nodes={"a": "A", "b": "B", "c": "C", "d": "C"})
    return desk


def test_connections_between_the_nodes_of_a_replica_and_others(tmp_path: Path) -> None:
    doors = Doors(TO_B)
    desk = across_nodes(tmp_path, doors)
    failed = asyncio.run(desk.tests.try_between(["b", "a"]))
    assert doors.asked == [["B", "A", "C"]]
    assert [link[:2] for link in failed] == [("a", "b"), ("c", "b"), ("d", "b")]
    assert failed[0].came == "64 of 262,144 bytes in 1.5 s"
    assert asyncio.run(desk.tests.remove(failed)) == {"b"}
    (tested,), (lost,) = desk.happened(events.LinksTested), desk.happened(events.WorkerLost)
    assert (tested.removed, lost.worker, lost.cause) == (["b"], "b", "link")


def test_nothing_is_tried_inside_a_node(tmp_path: Path) -> None:
    doors = Doors()
    assert asyncio.run(across_nodes(tmp_path, doors).tests.try_between(["d", "c"])) == []
    assert doors.asked == []


class Soon:
    """Nothing else is lost in the time that there is."""

    async def until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """See Dispatcher."""
        await asyncio.sleep(0)


async def fail_for(desk: Desk, *workers: str) -> list[str]:
    """A collective fails for these at once. Returns whose fault it was."""
    soon: Any = Soon()
    desk.agents.beating |= desk.workers.nodes  # or an agent may have yet to tell of a mate's end
    troubles = Troubles(HealthConfig(), desk.membership, soon, desk.workers, desk.tests)
    told = [troubles.settle(worker, 7, "reset by peer", COLLECTIVE) for worker in workers]
    return await asyncio.gather(*told)


def test_a_collective_that_fails_for_a_bad_connection_takes_out_its_bad_end(tmp_path: Path) -> None:
    """Not who tells of it first. They are tried twice for all of its replica."""
    doors = Doors(TO_B, TO_B)
    desk = Desk(tmp_path, each=2, doors=doors)
    assert asyncio.run(fail_for(desk, "a", "b")) == ["peer", "peer"]
    (tested,), (lost,) = desk.happened(events.LinksTested), desk.happened(events.WorkerLost)
    assert (tested.removed, lost.worker, lost.cause) == (["b"], "b", "link")
    assert len(doors.asked) == 2


@pytest.mark.parametrize("found", [[{}], [{("C", "D"): 0}], [TO_B, {}]])
def test_who_tells_first_is_lost_where_no_connection_of_its_replica_fails_twice(
    tmp_path: Path, found: list[dict[tuple[str, str], int]]
) -> None:
    desk = Desk(tmp_path, each=2, doors=Doors(*found))
    assert asyncio.run(fail_for(desk, "b", "a")) == ["own", "peer"]
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause) == ("b", "collective")
    assert desk.happened(events.LinksTested) == []


def test_a_newcomer_that_a_survivor_does_not_reach_is_taken_out_of_what_they_build(
    tmp_path: Path,
) -> None:
    """Survivors were ended one by one as they told of it, and its node was never left."""
    doors = Doors(*[{("A", "S"): 0}] * 2)
    desk = Desk(tmp_path, each=2, spares=["s"], doors=doors)
    desk.membership.lose("b")
    for rank, worker in enumerate("cdef"):
        desk.join(worker, desk.built[worker], generation=1, step=3, in_step=True, rank=rank % 2)
    desk.join("a", generation=1, step=3, in_step=True, rank=0)
    (repaired,) = desk.membership.places.repairs
    assert repaired.workers == ("a", "s") and {*desk.membership.roster.followers} == {"a"}
    assert asyncio.run(fail_for(desk, "a", "s")) == ["peer", "peer"]
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause, desk.workers.shunned_nodes) == ("s", "path", {"S"})
    assert doors.asked == [["A", "S", "C", "D"]] * 2


def test_newcomers_who_agree_do_not_outvote_the_others(tmp_path: Path) -> None:
    """Four of another subnet reach each other, and neither the survivor nor a whole replica: of two
    witnesses each would have had more failed connections than each of the four."""
    newcomers, old = "WXYZ", "AFGHIJ"
    doors = Doors(*[{(o, n): 0 for o in old for n in newcomers}] * 2)
    desk = Desk(tmp_path, each=5, spares=["w", "x", "y", "z"], doors=doors)
    for worker in "bcde":
        desk.membership.lose(worker)
    for number, worker in enumerate("fghijklmno"):
        desk.join(worker, desk.built[worker], generation=1, step=3, in_step=True, rank=number % 5)
    desk.join("a", generation=1, step=3, in_step=True, rank=0)
    asyncio.run(fail_for(desk, "a", "w", "x", "y", "z"))
    assert {event.worker for event in desk.happened(events.WorkerLost)} == {"w", "x", "y", "z"}
    assert desk.workers.shunned_nodes == {"W", "X", "Y", "Z"}
    assert doors.asked[0] == ["A", "W", "X", "Y", "Z", *"FGHIJ"]


def test_a_replica_that_forms_from_the_pool_has_its_connections_tried(tmp_path: Path) -> None:
    doors = Doors(*[{("S", "T"): 0, ("S", "C"): 0}] * 2)
    desk = Desk(tmp_path, each=2, spares=["s", "t"], doors=doors)
    for worker in "ab":
        desk.membership.lose(worker)
    desk.membership.advance()
    assert asyncio.run(fail_for(desk, "t", "s")) == ["peer", "peer"]
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause, desk.workers.shunned_nodes) == ("s", "link", {"S"})
    assert doors.asked == [["S", "T", "C", "D"]] * 2


@pytest.mark.parametrize(("least", "blamed"), [(2, "path"), (3, "collective")])
def test_so_has_one_of_the_first_roster(tmp_path: Path, least: int, blamed: str) -> None:
    """All six are building: without one two replicas are possible."""
    desk = Desk(tmp_path, each=2, least=least, building=True, doors=Doors(*[{("A", "B"): 0}] * 2))
    assert not desk.membership.roster.replicas
    asyncio.run(fail_for(desk, "b", "a"))
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause) == ("b", blamed)


def test_a_witness_that_is_lost_while_they_are_tried_says_nothing(tmp_path: Path) -> None:
    class Losing(Doors):
        async def try_links(
            self, nodes: Sequence[str], bound_s: float
        ) -> dict[tuple[str, str], int]:
            if self.asked:
                desk.membership.lose("c")
            return await super().try_links(nodes, bound_s)

    desk = Desk(tmp_path, each=2, doors=Losing(TO_B, TO_B))
    assert asyncio.run(fail_for(desk, "a", "b")) == ["peer", "peer"]
    (tested,), (lost,) = desk.happened(events.LinksTested), desk.happened(events.WorkerLost)
    assert (tested.count, lost.worker) == (1, "b")


def test_an_agent_s_door_serves_one_test_at_a_time(tmp_path: Path) -> None:
    class Slow(Doors):
        at_once = most = 0

        async def try_links(
            self, nodes: Sequence[str], bound_s: float
        ) -> dict[tuple[str, str], int]:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.sleep(0)
            self.at_once -= 1
            return await super().try_links(nodes, bound_s)

    async def try_twice() -> None:
        await asyncio.gather(*(desk.tests.try_between(["a", "b"]) for _ in range(2)))

    doors = Slow({}, {})
    desk = across_nodes(tmp_path, doors)
    asyncio.run(try_twice())
    assert (len(doors.asked), doors.most) == (2, 1)
