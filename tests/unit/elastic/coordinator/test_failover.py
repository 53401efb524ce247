"""A coordinator started anew decides nothing before it knows what the nodes' memory holds, waits
for workers that may be healthy, and ends whom the one before it has written off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing import CheckpointConfig
from elastic.config import HealthConfig
from elastic.coordinator.arrivals import Arrivals
from elastic.coordinator.aside import Aside
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.failover import Failover
from elastic.coordinator.replay import Replay
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.save_wish import SaveWish
from elastic.coordinator.workers import Workers
from elastic.membership.decisions import GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol import events
from elastic.protocol.causes import CRASH, NODE
from elastic.protocol.messages import (
    Answer,
    Build,
    Death,
    Identity,
    Report,
    Run,
    Standing,
    Stop,
)
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from tests.support.coordinator_desk import Agents
from trainer.loop.samples import Ledger
from trainer.parallel.layout import ParallelDims

SNAPSHOT, RECORDED, STEPS = 6, 8, 30
GROUPS = GroupConfig(
    max_replicas=1,
    min_replicas=1,
    dims=ParallelDims(),
    lanes=1,
    steps=STEPS,
    start_workers=1,
    max_regroups_without_progress=8,
)
SPARE = Identity(worker="spare", rank=1, node="n", pid=2)
WRITTEN_OFF = Identity(worker="written-off", rank=0, node="n", pid=3)
OF_WRITTEN_OFF = events.WorkerJoined(
    time=0.0, worker=WRITTEN_OFF.worker, node=WRITTEN_OFF.node, pid=WRITTEN_OFF.pid, born_ticks=1
)


class Unwatched(Workers):
    """No node has an agent."""

    def watch(self, identity: Identity) -> None:
        """See Workers."""
        self.started[identity.worker] = identity


class SlowSnapshots:
    """The nodes answer when they are told to, and hold a snapshot."""

    def __init__(self, membership: Membership) -> None:
        self.membership, self.asked, self.answer = membership, asyncio.Event(), asyncio.Event()

    async def look_again(self) -> None:
        self.asked.set()
        await asyncio.wait_for(self.answer.wait(), 10.0)
        self.membership.progress.snapshotted(SNAPSHOT)


def make_config(root: Path) -> CoordinatorConfig:
    started = events.RunStarted(
        time=0.0, name="r", layout={}, steps=STEPS, start_step=0, versions={}
    )
    return CoordinatorConfig(
        groups=GROUPS,
        paths=RunPaths(root=root),
        identity=RunIdentity(id="r"),
        prefix="run/",
        health=HealthConfig(),
        checkpoint=CheckpointConfig(memory_every=1),
        generation=0,
        restore_step=0,
        snapshot=None,
        started=started,
        faults=(),
        ledger=Ledger(seed=0, global_batch=1, lanes=1, samples=1),
    )


def replayed(
    draining: frozenset[str] = frozenset(),
    unheard: frozenset[str] = frozenset(),
    others: Sequence[str] = (),
    written_off: dict[str, events.WorkerJoined] | None = None,
) -> Replay:
    """The only replica's worker is lost, a spare lives, and `others`, each on a node of its own;
    nothing was saved to the store."""
    living = {
        worker: events.WorkerJoined(time=0.0, worker=worker, node=node, pid=2, born_ticks=1)
        for worker, node in [(w, "n") for w in (SPARE.worker, *unheard)]
        + [(other, f"n-{other}") for other in others]
    }
    return Replay(
        started=2,
        workers=living,
        lost=frozenset({WRITTEN_OFF.worker}) - unheard,
        written_off=written_off or {},
        unheard=unheard,
        draining=draining,
        leaving=frozenset(),
        draining_nodes=frozenset(),
        shunned_nodes=frozenset(),
        generation=1,
        newest_s=0.0,
        began=0,
        restored=1,
        formations=1,
        recorded=RECORDED,
        committed=frozenset(),
        saved=0,
        winding_down=False,
        until=None,
        fired=(),
        replacements=(),
        skips=(),
        going_back=None,
        troubles=(),
    )


def report(built: int) -> Report:
    return Report(identity=SPARE, built=built)


def at_work(identity: Identity, *, formed: int) -> Standing:
    """Of the only replica, in the roster of the first generation."""
    return Standing(
        identity=identity,
        formed=formed,
        built=True,
        generation=1,
        lanes=(0,),
        replicas=1,
        proven=True,
    )


class Desk:
    """The coordinator's parts that have to do with it. Nobody is known yet."""

    def __init__(self, root: Path) -> None:
        config = make_config(root)
        self.paths = config.paths
        self.membership = Membership(GROUPS, Progress())
        self.records = RunLog(config, self.membership)
        self.dispatcher = Dispatcher(self.membership, self.records, lambda effects: None)
        self.agents = Agents()
        agents: Any = self.agents
        snapshots: Any = SimpleNamespace(node_lost=lambda node: None)
        self.workers = Unwatched(
            config,
            self.membership,
            self.dispatcher,
            self.records,
            agents,
            snapshots,
            Aside(self.membership, self.dispatcher),
        )
        self.arrivals = Arrivals(
            self.membership, self.dispatcher, self.workers, self.records, patience_s=10.0
        )
        self.ready: list[bool] = []
        self.taken_back: list[str] = []

    def failover(
        self,
        snapshots: Any = None,
        draining: frozenset[str] = frozenset(),
        unheard: frozenset[str] = frozenset(),
        others: Sequence[str] = (),
        silent_s: float = 60.0,
        locked_s: float = 60.0,
        written_off: dict[str, events.WorkerJoined] | None = None,
    ) -> Failover:
        return Failover(
            replayed(draining, unheard, others, written_off),
            self.membership,
            self.dispatcher,
            self.workers,
            self.arrivals,
            snapshots,
            silent_s,
            locked_s,
            self.taken_back.extend,
            lambda: self.ready.append(self.dispatcher.ready.is_set()),
        )


async def go_back_to_the_snapshot(desk: Desk) -> None:
    snapshots = SlowSnapshots(desk.membership)
    work, dispatcher = desk.failover(snapshots), desk.dispatcher
    await work.hear(Standing(identity=SPARE))
    await snapshots.asked.wait()
    await dispatcher.tell()
    assert not dispatcher.ready.is_set(), "all workers have spoken, the nodes have not"
    snapshots.answer.set()
    await dispatcher.ready.wait()
    assert desk.ready == [True]
    build = await dispatcher.join(report(built=0))
    assert isinstance(build, Build)
    run = await dispatcher.join(report(built=build.formed))
    assert isinstance(run, Run)
    assert (run.restore, run.step, run.source) == (True, SNAPSHOT, "memory")


def test_the_run_goes_back_to_the_snapshot_and_not_to_its_seed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    asyncio.run(go_back_to_the_snapshot(desk))
    desk.records.end("interrupted", None).result()


async def expel_one_that_dies(desk: Desk) -> None:
    work = desk.failover()
    await work.hear(Standing(identity=WRITTEN_OFF))
    death = Death(worker=WRITTEN_OFF.worker, cause=CRASH, detail="process 3 ended")
    lost = asyncio.create_task(desk.workers.lose_all([death]))
    await asyncio.sleep(0)  # it waits until the run is known
    await work.hear(Standing(identity=SPARE))
    await desk.dispatcher.ready.wait()
    await lost
    assert desk.ready == [True]
    while not desk.agents.killed:
        await asyncio.sleep(0)


def test_one_that_was_written_off_may_die_before_it_is_ended(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    asyncio.run(expel_one_that_dies(desk))
    assert desk.membership.stopped is None and desk.agents.killed == [WRITTEN_OFF.worker]
    happened = read_events(desk.paths.events)
    assert not any(isinstance(e, events.WorkerLost) for e in happened), "it is lost once"
    desk.records.end("interrupted", None).result()


async def end_one_that_is_silent(desk: Desk) -> Answer:
    work = desk.failover(written_off={WRITTEN_OFF.worker: OF_WRITTEN_OFF})
    await work.hear(Standing(identity=SPARE))
    await desk.dispatcher.ready.wait()
    while not desk.agents.killed:
        await asyncio.sleep(0)
    return await desk.dispatcher.join(Report(identity=WRITTEN_OFF, built=1))


def test_one_that_was_written_off_and_lives_is_ended_and_no_member(tmp_path: Path) -> None:
    """The coordinator before may have died before it sent the signal. It speaks late, or never."""
    desk = Desk(tmp_path)
    answer = asyncio.run(end_one_that_is_silent(desk))
    assert isinstance(answer, Stop) and "written off" in str(answer.error)
    assert desk.agents.killed == [WRITTEN_OFF.worker]
    assert desk.workers.started.keys() == desk.membership.members.keys() == {SPARE.worker}
    desk.records.end("interrupted", None).result()


async def hear_one_of_the_lost_tail(desk: Desk) -> None:
    work = desk.failover()
    unknown = Identity(worker="unknown", rank=0, node="n", pid=4, born_ticks=1)
    await work.hear(at_work(unknown, formed=2))
    await work.hear(Standing(identity=SPARE))
    await desk.dispatcher.ready.wait()


def test_one_whose_arrival_is_in_no_record_is_taken_from_where_it_stands(tmp_path: Path) -> None:
    """Records end early where the coordinator's machine was lost with what it had not written to
    the storage: such a worker was ended, though it stood in the roster."""
    desk = Desk(tmp_path)
    asyncio.run(hear_one_of_the_lost_tail(desk))
    assert desk.membership.roster.workers == ("unknown",) and desk.membership.call is None
    assert desk.workers.started.keys() == {"unknown", "spare"}
    joined = [e for e in read_events(desk.paths.events) if isinstance(e, events.WorkerJoined)]
    assert [(e.worker, e.pid) for e in joined] == [("unknown", 4)], "the next one is told of it"
    desk.records.end("interrupted", None).result()
    assert desk.agents.killed == []


async def hear_whom_another_coordinator_did_not(desk: Desk) -> None:
    work = desk.failover(unheard=frozenset({WRITTEN_OFF.worker, "gone"}), silent_s=0.05)
    await work.hear(Standing(identity=SPARE))
    await work.hear(at_work(WRITTEN_OFF, formed=1))
    await desk.dispatcher.ready.wait()
    while not desk.agents.killed:
        await asyncio.sleep(0)


def test_who_was_cut_off_with_the_coordinator_before_goes_on(tmp_path: Path) -> None:
    """It wrote all nodes off, and no roster stood since; one that is gone is lost once."""
    desk = Desk(tmp_path)
    asyncio.run(hear_whom_another_coordinator_did_not(desk))
    assert desk.membership.roster.workers == (WRITTEN_OFF.worker,)
    assert desk.membership.call is None, "no step stops"
    assert desk.agents.killed == ["gone"] and desk.taken_back == [WRITTEN_OFF.node]
    happened = read_events(desk.paths.events)
    joined = [e.worker for e in happened if isinstance(e, events.WorkerJoined)]
    assert joined == [WRITTEN_OFF.worker], "the next one is told that it is there"
    assert not any(isinstance(e, events.WorkerLost) for e in happened)
    desk.records.end("interrupted", None).result()


async def hear_of_a_loss_of_nobody(desk: Desk) -> None:
    work = desk.failover()
    work._replayed = replace(work._replayed, unheard=frozenset({"nobody"}))
    await work.hear(Standing(identity=SPARE))
    await asyncio.wait_for(desk.dispatcher.ready.wait(), 30.0)


def test_a_loss_of_whom_the_records_do_not_know_ends_nobody(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    asyncio.run(hear_of_a_loss_of_nobody(desk))
    assert desk.ready == [True] and desk.membership.stopped is None
    assert desk.workers.started.keys() == {SPARE.worker} and desk.agents.killed == []
    desk.records.end("interrupted", None).result()


OTHERS = [f"w{number}" for number in range(20)]
OF_OTHERS = {w: Identity(worker=w, rank=2, node=f"n-{w}", pid=2, born_ticks=1) for w in OTHERS}


def lost_in(desk: Desk) -> dict[str, events.WorkerLost]:
    happened = read_events(desk.paths.events)
    return {e.worker: e for e in happened if isinstance(e, events.WorkerLost)}


async def hear_one_after_the_other(desk: Desk) -> None:
    work = desk.failover(others=OTHERS, silent_s=0.3)
    await work.hear(Standing(identity=SPARE))
    for identity in OF_OTHERS.values():
        await asyncio.sleep(0.05)
        await work.hear(Standing(identity=identity))
    await desk.dispatcher.ready.wait()


def test_the_time_of_the_silent_begins_again_while_others_speak(tmp_path: Path) -> None:
    """Of thousands the last come late: they were ended though they had spoken, too."""
    desk = Desk(tmp_path)
    asyncio.run(hear_one_after_the_other(desk))
    assert desk.workers.started.keys() == {SPARE.worker, *OTHERS} and not lost_in(desk)
    desk.records.end("interrupted", None).result()
    assert desk.agents.killed == []


async def hear_one_with_its_lock_held(desk: Desk) -> None:
    desk.agents.beating.add("n-w0")
    work = desk.failover(others=["w0", "w1"], silent_s=0.1)
    await work.hear(Standing(identity=SPARE))
    await work.hear(Standing(identity=OF_OTHERS["w1"]))
    await asyncio.sleep(0.5)
    await work.hear(Standing(identity=OF_OTHERS["w0"]))
    await desk.dispatcher.ready.wait()


def test_one_that_its_agent_watches_has_the_time_that_its_heartbeat_has(tmp_path: Path) -> None:
    """NCCL's start, a compiler and the writing of a profile hold the interpreter's lock."""
    desk = Desk(tmp_path)
    asyncio.run(hear_one_with_its_lock_held(desk))
    assert "w0" in desk.workers.started and not lost_in(desk)
    desk.records.end("interrupted", None).result()


async def wait_for_who_is_silent(desk: Desk, agents: Sequence[str]) -> None:
    desk.agents.beating.update(agents)
    work = desk.failover(others=["w0"], silent_s=0.1, locked_s=0.3)
    await work.hear(Standing(identity=SPARE))
    await desk.dispatcher.ready.wait()
    while not desk.agents.killed:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("agents", "why"),
    [
        (["n-w0"], "for 0.3 s (10 times health.freeze_timeout_s)"),
        ([], "for 0.1 s, and its node has no agent that beats"),
    ],
)
def test_who_is_silent_for_too_long_is_ended(tmp_path: Path, agents: list[str], why: str) -> None:
    desk = Desk(tmp_path)
    asyncio.run(wait_for_who_is_silent(desk, agents))
    assert desk.agents.killed == ["w0"]
    assert lost_in(desk)["w0"].detail.endswith(why)
    desk.records.end("interrupted", None).result()


async def hear_of_ends_before_the_run_is_known(desk: Desk) -> None:
    work = desk.failover(others=["w0", "w1", "w2"])
    await work.hear(Standing(identity=SPARE))
    await asyncio.sleep(0)  # they are watched
    death = Death(worker="w0", cause=CRASH, detail="process 2 ended")
    lost = [desk.workers.lose_all([death]), desk.workers.lose_nodes({"n-w1": "", "n-w2": ""})]
    await asyncio.wait_for(asyncio.gather(*lost, desk.dispatcher.ready.wait()), 30.0)


def test_nobody_waits_for_the_dead_nor_for_lost_nodes(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    asyncio.run(hear_of_ends_before_the_run_is_known(desk))
    assert {w: e.cause for w, e in lost_in(desk).items()} == {"w0": CRASH, "w1": NODE, "w2": NODE}
    desk.records.end("interrupted", None).result()
    assert desk.agents.killed == []


async def go_on_where_the_last_copy_goes(desk: Desk) -> None:
    """The worker that lives has the only place, and the only copy."""
    work = desk.failover(draining=frozenset({SPARE.worker}))
    await work.hear(
        Standing(
            identity=SPARE, formed=1, built=True, generation=1, lanes=(0,), replicas=1, proven=True
        )
    )
    await desk.dispatcher.ready.wait()


def test_a_last_copy_that_goes_is_saved_although_the_wish_was_another_process_s(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    asyncio.run(go_on_where_the_last_copy_goes(desk))
    assert SaveWish(desk.membership).wanted()
    desk.records.end("interrupted", None).result()
