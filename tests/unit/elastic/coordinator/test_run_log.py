"""Small runs, played by hand: when those who were called are noted as gathered; the run's end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpointing.config import CheckpointConfig
from elastic.config import HealthConfig
from elastic.coordinator import dispatcher as dispatcher
from elastic.coordinator import run_log
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog, decide_equal
from elastic.membership.decisions import GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol import events
from elastic.protocol.messages import Answer, Build, Identity, Report, Run, Stop
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from trainer.config import TrainConfig
from trainer.loop.samples import Ledger
from trainer.parallel.layout import ParallelDims

STEPS = 30


class Desk:
    """The coordinator's parts that take part in a regroup, on a clock that stands still.

    Args:
        directory: of the records.
        replicas: of the run; it goes on with one.
        each: workers of a replica.
    """

    def __init__(self, directory: Path, *, replicas: int, each: int = 1) -> None:
        groups = GroupConfig(
            max_replicas=replicas,
            min_replicas=1,
            dims=ParallelDims(shard=each),
            lanes=replicas,
            steps=STEPS,
            start_workers=replicas * each,
            max_regroups_without_progress=8,
        )
        train = TrainConfig(task=None, steps=STEPS, global_batch=replicas)
        config = CoordinatorConfig(
            groups=groups,
            paths=RunPaths(root=directory),
            identity=RunIdentity(id="r"),
            prefix="run/",
            health=HealthConfig(),
            checkpoint=CheckpointConfig(),
            generation=0,
            restore_step=0,
            snapshot=None,
            started=events.RunStarted(
                time=0.0, name="r", layout={}, steps=STEPS, start_step=0, versions={}
            ),
            faults=(),
            ledger=Ledger(
                seed=train.seed,
                global_batch=train.global_batch,
                lanes=replicas,
                samples=STEPS * replicas,
            ),
        )
        self.paths = config.paths
        self.membership = Membership(groups, Progress())
        self.records = RunLog(config, self.membership)
        self.dispatcher = Dispatcher(self.membership, self.records, lambda effects: None)
        self.workers = [f"w{rank}" for rank in range(replicas * each)]
        self.built: dict[str, int] = {}
        self.answers: dict[str, asyncio.Task[Answer]] = {}
        self.now = 100.0

    async def start(self) -> None:
        """All build, and train in generation 1."""
        for worker in self.workers:
            await self.join(worker)
        for worker in self.workers:
            answer = await self.answers[worker]
            assert isinstance(answer, Build)
            self.built[worker] = answer.formed
        for worker in self.workers:
            await self.join(worker)
        for worker in self.workers:
            assert isinstance(await self.answers[worker], Run)

    async def join(self, worker: str, at: float = 100.0, *, step: int | None = None) -> None:
        """A worker joins at a time; with `step`, out of the middle of it."""
        self.now = at
        report = Report(
            identity=Identity(worker=worker, rank=int(worker[1:]), node="n", pid=1),
            built=self.built.get(worker, 0),
            generation=self.membership.progress.generation,
            step=step,
            in_step=step is not None,
        )
        self.answers[worker] = asyncio.create_task(self.dispatcher.join(report))
        for _ in range(3):  # the join, and the decision that serves all who came with it
            await asyncio.sleep(0)

    async def lose(self, worker: str, at: float) -> None:
        """A worker is gone."""
        self.now = at
        self.membership.lose(worker)
        self.dispatcher.turn_away(worker)
        await self.dispatcher.advance()

    def regroups(self) -> list[tuple[str, float, int]]:
        """(kind, time, generation) of the events, without the start's."""
        kinds = events.RegroupCalled | events.RegroupGathered | events.RegroupDone
        found = [e for e in read_events(self.paths.events) if isinstance(e, kinds)]
        return [(e.kind, e.time, e.generation) for e in found if e.generation > 1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Desk]]:
    """The clock is that of the desk in this list."""
    desks: list[Desk] = []
    now = SimpleNamespace(time=lambda: desks[0].now)
    monkeypatch.setattr(run_log, "time", now)
    monkeypatch.setattr(dispatcher, "gc", SimpleNamespace(disable=lambda: None, enable=None))
    yield desks
    desks[0].records.end("interrupted", None).result()


def desk_of(clock: list[Desk], directory: Path, *, replicas: int, each: int = 1) -> Desk:
    clock.append(Desk(directory, replicas=replicas, each=each))
    return clock[0]


def test_the_last_survivor_that_lets_go_of_its_step_is_stamped(
    tmp_path: Path, clock: list[Desk]
) -> None:
    desk = desk_of(clock, tmp_path, replicas=3)

    async def play() -> None:
        await desk.start()
        await desk.lose("w2", at=101.0)
        await desk.join("w1", at=101.25, step=5)
        await desk.join("w3", at=101.5)  # a spare, which nobody had called
        await desk.join("w0", at=101.75, step=5)

    asyncio.run(play())
    assert desk.regroups() == [
        ("regroup_called", 101.0, 2),
        ("regroup_gathered", 101.75, 2),
        ("regroup_done", 101.75, 2),
    ]


def test_who_comes_while_the_lost_one_is_waited_for_is_stamped_with_his_own_time(
    tmp_path: Path, clock: list[Desk]
) -> None:
    desk = desk_of(clock, tmp_path, replicas=3)

    async def play() -> None:
        await desk.start()
        await desk.join("w0", at=101.0, step=5)  # it notices before anybody knows of a loss
        await desk.join("w1", at=101.25, step=5)
        await desk.join("w3", at=101.5)
        assert [kind for kind, *_ in desk.regroups()] == ["regroup_called"]
        await desk.lose("w2", at=102.0)

    asyncio.run(play())
    assert desk.regroups() == [
        ("regroup_called", 101.0, 2),
        ("regroup_gathered", 101.25, 2),
        ("regroup_done", 102.0, 2),
    ]


def test_nobody_is_left_to_come_where_the_last_survivor_made_the_coordinator_call(
    tmp_path: Path, clock: list[Desk]
) -> None:
    desk = desk_of(clock, tmp_path, replicas=2)

    async def play() -> None:
        await desk.start()
        await desk.join("w0", at=101.0, step=5)
        await desk.lose("w1", at=102.0)

    asyncio.run(play())
    assert desk.regroups() == [
        ("regroup_called", 101.0, 2),
        ("regroup_gathered", 101.0, 2),
        ("regroup_done", 102.0, 2),
    ]


def test_a_roster_waits_for_the_survivors_of_a_broken_replica_which_follow(
    tmp_path: Path, clock: list[Desk]
) -> None:
    desk = desk_of(clock, tmp_path, replicas=2, each=2)

    async def play() -> None:
        await desk.start()
        await desk.lose("w3", at=101.0)
        await desk.join("w2", at=101.25, step=5)
        await desk.join("w1", at=101.5, step=5)
        await desk.join("w0", at=101.75, step=5)

    asyncio.run(play())
    assert desk.regroups() == [
        ("regroup_called", 101.0, 2),
        ("regroup_gathered", 101.75, 2),
        ("regroup_done", 101.75, 2),
    ]


def test_the_wait_for_workers_comes_after_the_last_has_let_go(
    tmp_path: Path, clock: list[Desk]
) -> None:
    desk = desk_of(clock, tmp_path, replicas=1, each=2)

    async def play() -> None:
        await desk.start()
        await desk.lose("w1", at=101.0)
        await desk.join("w0", at=101.25, step=5)
        await desk.join("w2", at=160.0)  # machines have come: a replica is made

    asyncio.run(play())
    assert desk.regroups() == [("regroup_called", 101.0, 2), ("regroup_gathered", 101.25, 2)]


def test_the_start_tells_what_it_lacks_where_a_machine_is_no_good(
    tmp_path: Path, clock: list[Desk]
) -> None:
    desk = desk_of(clock, tmp_path, replicas=1, each=3)

    async def play() -> None:
        await desk.join("w0")
        await desk.join("w1")
        for worker in ("w1", "w2"):  # as the preflight of their machine has it
            desk.membership.drain(worker)
        await desk.dispatcher.advance()
        await desk.join("w3")
        await desk.join("w4")

    asyncio.run(play())
    told = [e for e in read_events(desk.paths.events) if isinstance(e, events.BelowMinimum)]
    assert [(e.alive, e.needed, e.missing[:9]) for e in told] == [(0, 1, "2 workers")], (
        "not again for each that comes"
    )
    assert told[0].missing.endswith(
        "; 1 more are here and get no place: their machines are at fault or will go, or their "
        "versions are others (worker_refused)"
    )


def test_a_run_that_ends_gathers_nobody(tmp_path: Path, clock: list[Desk]) -> None:
    desk = desk_of(clock, tmp_path, replicas=2)

    async def play() -> None:
        await desk.start()
        await desk.lose("w1", at=101.0)
        await desk.dispatcher.stop("enough")
        await desk.join("w0", at=102.0, step=5)

    asyncio.run(play())
    assert desk.regroups() == [("regroup_called", 101.0, 2)]


def test_nothing_follows_the_end_of_a_run(tmp_path: Path, clock: list[Desk]) -> None:
    """Not what its coordinator is told meanwhile, nor one that is started anew."""
    desk = desk_of(clock, tmp_path, replicas=1)
    desk.records.begin([])
    desk.records.end("failed", "too many crashes").result()
    happened = read_events(desk.paths.events)
    desk.records.note(events.StopRequested(time=1.0, reason="SIGINT"))
    desk.records.end("finished", None).result()
    anew = Desk(tmp_path, replicas=1)
    anew.records.begin(happened)
    anew.records.end("finished", None).result()
    assert read_events(desk.paths.events) == happened
    assert anew.membership.stopped == Stop(error="too many crashes")


def test_a_run_ends_whatever_its_error_says(tmp_path: Path, clock: list[Desk]) -> None:
    """Its end was in no record where the error named a file whose name is no UTF-8."""
    desk = desk_of(clock, tmp_path, replicas=1)
    desk.records.end("failed", "cannot decode " + os.fsdecode(b"caf\xe9.png")).result()
    end = read_events(desk.paths.events)[-1]
    assert isinstance(end, events.RunEnded)
    assert (end.outcome, end.error) == ("failed", "cannot decode caf?.png")


def test_a_run_begins_once_and_its_coordinator_each_time(tmp_path: Path, clock: list[Desk]) -> None:
    desk = desk_of(clock, tmp_path, replicas=1)
    desk.records.begin([])
    begun = read_events(desk.paths.events)
    assert [e.kind for e in begun] == ["run_started", "coordinator_started"]
    desk.records.begin(begun)
    assert [e.kind for e in read_events(desk.paths.events)][2:] == ["coordinator_started"]


@pytest.mark.parametrize(
    ("digests", "replicas", "equal"),
    [
        ({}, 2, None),
        ({"0": {"a": "x"}}, 2, None),
        ({"0": {"a": "x"}}, 1, None),  # it has nobody to be compared with
        ({"0": {"a": "x", "b": "x"}}, 2, None),  # the other slot's may differ
        ({"0": {"a": "x", "b": "x"}, "1": {"c": "y"}}, 2, None),
        ({"0": {"a": "x", "b": "x"}, "1": {"c": "y", "d": "y"}}, 3, None),
        ({"0": {"a": "x", "b": "x"}, "1": {"c": "y", "d": "y"}}, 2, True),
        ({"0": {"a": "x", "b": "x"}, "1": {"c": "y", "d": "y"}}, 1, True),  # one has just healed
        ({"0": {"a": "x", "b": "z"}}, 3, False),
    ],
)
def test_replicas_are_equal_where_all_have_shown_it(
    digests: dict[str, dict[str, str]], replicas: int, equal: bool | None
) -> None:
    assert decide_equal(digests, slots=2, replicas=replicas) is equal


def compared(desk: Desk) -> list[bool]:
    happened = read_events(desk.paths.events)
    found = [e for e in happened if isinstance(e, events.ReplicasCompared)]
    assert all(e.replicas == 2 for e in found)
    return [e.equal for e in found]


def test_the_last_states_are_compared_in_the_newest_roster(
    tmp_path: Path, clock: list[Desk]
) -> None:
    desk = desk_of(clock, tmp_path, replicas=2)

    async def play() -> None:
        await desk.start()
        assert desk.records.compare("w0", 1, "shard 0", "x")
        await desk.lose("w1", at=101.0)
        await desk.join("w0", at=101.5, step=STEPS - 1)

    asyncio.run(play())
    assert desk.records.compare("w1", 1, "shard 0", "of a roster before")
    assert desk.records.compare("w0", 2, "shard 0", "x")
    assert compared(desk) == [], "one alone is equal to nobody"


def test_the_last_states_are_noted_once_all_are_known(tmp_path: Path, clock: list[Desk]) -> None:
    desk = desk_of(clock, tmp_path, replicas=2)
    asyncio.run(desk.start())
    for _ in range(2):  # an answer may be lost
        assert desk.records.compare("w0", 1, "shard 0", "x")
    assert compared(desk) == []
    for _ in range(2):
        assert desk.records.compare("w1", 1, "shard 0", "x")
    assert compared(desk) == [True]
    assert not desk.records.compare("w1", 1, "shard 0", "y")
    assert compared(desk) == [True, False]


@pytest.mark.parametrize(("saved", "outcome"), [(STEPS - 1, "stopped"), (STEPS, "finished")])
def test_a_run_that_was_asked_to_stop_in_its_last_step_is_finished(
    tmp_path: Path, clock: list[Desk], saved: int, outcome: str
) -> None:
    desk = desk_of(clock, tmp_path, replicas=1)
    desk.membership.wind_down()
    desk.membership.progress.checkpointed(saved)
    desk.records.end("finished", None).result()
    ended = read_events(desk.paths.events)[-1]
    assert isinstance(ended, events.RunEnded) and ended.outcome == outcome


def test_all_who_wait_for_the_disk_share_one_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a regroup that is every worker."""
    desk, synced = Desk(tmp_path, replicas=2), list[int]()
    fdatasync = os.fdatasync

    def counted(fd: int) -> None:
        synced.append(fd)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", counted)

    async def wait() -> None:
        desk.records.begin(())
        await asyncio.gather(*(desk.records.durable() for _ in range(100)))
        assert len(synced) == 2, "of either file"
        await desk.records.durable()
        assert len(synced) == 2, "nothing was written since"

    asyncio.run(wait())


def test_records_that_cannot_be_synced_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path, replicas=2)

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "fdatasync", fails)

    async def wait() -> None:
        desk.records.begin(())
        await desk.records.durable()

    asyncio.run(wait())
    stopped = desk.membership.stopped
    assert stopped is not None and "the disk is gone" in (stopped.error or "")


def test_a_worker_of_other_versions_waits_and_is_written_down_with_its_node(tmp_path: Path) -> None:
    desk = Desk(tmp_path, replicas=2)

    async def refuse() -> None:
        await desk.start()
        odd = Identity(worker="odd", rank=2, node="o", pid=3, versions=(("torch", "2.11.0"),))
        waits = asyncio.create_task(desk.dispatcher.join(Report(identity=odd)))
        for _ in range(3):  # the join, and the decision that serves it
            await asyncio.sleep(0)
        assert not waits.done()
        waits.cancel()

    asyncio.run(refuse())
    told = [e for e in read_events(desk.paths.events) if isinstance(e, events.WorkerRefused)]
    assert [(event.worker, event.node) for event in told] == [("odd", "o")]
    assert told[0].detail.startswith("torch 2.11.0 where the run has none: ")
