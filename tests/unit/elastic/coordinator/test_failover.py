"""A coordinator started anew decides nothing before it knows what the nodes' memory holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from checkpointing import CheckpointConfig
from elastic.config import HealthConfig
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.failover import Failover
from elastic.coordinator.replay import Replay
from elastic.coordinator.run_log import RunLog
from elastic.membership.decisions import GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol import events
from elastic.protocol.messages import Build, Identity, Report, Run, Standing
from elastic.protocol.run_paths import RunPaths
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


class Workers:
    """Nobody is watched; who is lost is lost at once."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    def watch(self, identity: Identity) -> None: ...

    def retire(self, workers: Any, *, dismiss: bool) -> None: ...

    def shun(self, nodes: Any) -> None: ...

    async def lose(self, worker: str, *_: Any) -> None:
        self.membership.lose(worker)


class SlowSnapshots:
    """The nodes answer when they are told to, and hold a snapshot."""

    def __init__(self, membership: Membership) -> None:
        self.membership, self.asked, self.answer = membership, asyncio.Event(), asyncio.Event()

    async def look_again(self, timeout_s: float) -> None:
        self.asked.set()
        await asyncio.wait_for(self.answer.wait(), timeout_s)
        self.membership.progress.snapshotted(SNAPSHOT)


def make_records(root: Path, membership: Membership) -> RunLog:
    started = events.RunStarted(
        time=0.0, name="r", layout={}, steps=STEPS, start_step=0, versions={}
    )
    config = CoordinatorConfig(
        groups=GROUPS,
        paths=RunPaths(root=root),
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
    return RunLog(config, membership)


def replayed() -> Replay:
    """The only replica's worker is lost, a spare lives; nothing was saved to the store."""
    joined = events.WorkerJoined(time=0.0, worker="spare", node="n", pid=2, born_ticks=1)
    return Replay(
        started=2,
        workers={"spare": joined},
        draining=frozenset(),
        leaving=frozenset(),
        draining_nodes=frozenset(),
        shunned_nodes=frozenset(),
        happened=(),
        generation=1,
        began=0,
        restored=1,
        formations=1,
        recorded=RECORDED,
        committed=frozenset(),
        winding_down=False,
        until=None,
        fired=(),
        replacements=(),
        skips=(),
        going_back=None,
    )


def report(built: int) -> Report:
    return Report(identity=SPARE, built=built)


async def failover(root: Path) -> None:
    membership = Membership(GROUPS, Progress())
    records = make_records(root, membership)
    dispatcher = Dispatcher(membership, records, lambda effects: None)
    snapshots = SlowSnapshots(membership)
    workers: Any = Workers(membership)
    looking: Any = snapshots
    ready: list[bool] = []
    work = Failover(
        replayed(),
        membership,
        dispatcher,
        workers,
        looking,
        10.0,
        lambda: ready.append(dispatcher.ready.is_set()),
    )
    await work.hear(Standing(identity=SPARE))
    await snapshots.asked.wait()
    await dispatcher.tell()
    assert not dispatcher.ready.is_set(), "all workers have spoken, the nodes have not"
    snapshots.answer.set()
    await dispatcher.ready.wait()
    assert ready == [True]
    build = await dispatcher.join(report(built=0))
    assert isinstance(build, Build)
    run = await dispatcher.join(report(built=build.formed))
    assert isinstance(run, Run)
    assert (run.restore, run.step, run.source) == (True, SNAPSHOT, "memory")
    records.end("interrupted", None)


def test_the_run_goes_back_to_the_snapshot_and_not_to_its_seed(tmp_path: Path) -> None:
    asyncio.run(failover(tmp_path))
