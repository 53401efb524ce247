"""What the coordinator does about connections that fail: nothing before all have told, and then
those in common are lost, with the evidence."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpointing import CheckpointConfig
from elastic.config import HealthConfig
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.link_tests import LinkTests
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.decisions import GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol import events
from elastic.protocol.messages import Build, Identity, LinkTest, Report
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from trainer.loop.samples import Ledger
from trainer.parallel.layout import ParallelDims

ALL_GOOD: dict[str, dict[int, int]] = {"a": {}, "b": {}, "c": {}}
B_FAILS: dict[str, dict[int, int]] = {"a": {1: 64}, "b": {0: 64, 2: 0}, "c": {1: 64}}


class Agents:
    """Notes whom they are to kill."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    async def signal(self, identity: Identity, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(identity.worker)


class Desk:
    """The coordinator's parts that have to do with it, and a roster of a, b and c, each on a node
    of its own; `spares` wait on those that they are named after."""

    def __init__(self, root: Path, *, least: int = 1, spares: Sequence[str] = ()) -> None:
        groups = GroupConfig(
            max_replicas=3,
            min_replicas=least,
            dims=ParallelDims(),
            lanes=3,
            steps=30,
            start_workers=3,
            max_regroups_without_progress=8,
        )
        self.paths = RunPaths(root=root)
        started = events.RunStarted(
            time=0.0, name="r", layout={}, steps=30, start_step=0, versions={}
        )
        config = CoordinatorConfig(
            groups=groups,
            paths=self.paths,
            prefix="run/",
            health=HealthConfig(),
            checkpoint=CheckpointConfig(),
            generation=0,
            restore_step=0,
            snapshot=None,
            started=started,
            faults=(),
            ledger=Ledger(seed=0, global_batch=1, lanes=1, samples=1),
        )
        self.membership = Membership(groups, Progress())
        self.records = RunLog(config, self.membership)
        self.dispatcher = Dispatcher(self.membership, self.records, lambda effects: None)
        self.dispatcher.ready.set()
        self.agents = Agents()
        agents: Any = self.agents
        snapshots: Any = None
        self.workers = Workers(
            config, self.membership, self.dispatcher, self.records, agents, snapshots
        )
        self.built: dict[str, int] = {}
        self.tests = LinkTests(self.membership, self.workers, self.records)
        for rank, worker in enumerate(("a", "b", "c", *spares)):
            identity = Identity(worker=worker, rank=rank, node=worker[0].upper(), pid=rank)
            self.workers.started[worker] = identity
            self.join(worker)
        for worker in ("a", "b", "c"):
            self.join(worker, built=self.built[worker])

    def join(self, worker: str, built: int = 0) -> None:
        self.membership.join(Report(identity=self.workers.started[worker], built=built))
        answers = self.membership.advance().answers
        self.built.update({w: a.formed for w, a in answers.items() if isinstance(a, Build)})

    async def tell(self, found: dict[str, dict[int, int]], *, generation: int = 1) -> None:
        for worker, short in found.items():
            test = LinkTest(generation=generation, short=short, of_bytes=1000, bound_s=10.0)
            await self.tests.take(worker, test)
        await asyncio.sleep(0)  # the agents are told aside
        gc.enable()  # the dispatcher puts it off for longer than this loop lasts

    def happened(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in read_events(self.paths.events) if isinstance(event, kind)]


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
