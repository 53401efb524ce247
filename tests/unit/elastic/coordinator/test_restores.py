"""What the coordinator does about a checkpoint that the workers cannot read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from checkpointing import CheckpointConfig, Store, list_steps, open_store
from elastic.config import HealthConfig
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.restores import Restores
from elastic.coordinator.run_log import RunLog
from elastic.membership.decisions import GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol import events
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from tests.support.tiny_checkpoint import KEYS, write_state
from trainer.loop.samples import Ledger
from trainer.parallel.layout import ParallelDims

GENERATION, REASON = 3, "d/5f/r00000/x.safetensors: block 0: its CRC32 differed twice."


@dataclass
class Desk:
    """The coordinator's parts that have to do with it."""

    store: Store
    paths: RunPaths
    membership: Membership
    receipts: Receipts
    restores: Restores

    def failed(self) -> list[int]:
        """Steps in the events."""
        return [
            e.step for e in read_events(self.paths.events) if isinstance(e, events.CheckpointFailed)
        ]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Checkpoints of 10 and 20, and the roster that is to restore 20."""
    paths = RunPaths(root=tmp_path)
    store = open_store(paths.checkpoints)
    for step in (10, 20):
        write_state(store, {"w": torch.randn(4, 4)}, step=step)
    groups = GroupConfig(
        max_replicas=1,
        min_replicas=1,
        dims=ParallelDims(),
        lanes=1,
        steps=30,
        start_workers=1,
        max_regroups_without_progress=8,
    )
    config = CoordinatorConfig(
        groups=groups,
        paths=paths,
        prefix="run/",
        health=HealthConfig(),
        checkpoint=CheckpointConfig(),
        generation=GENERATION,
        restore_step=20,
        snapshot=None,
        started=events.RunStarted(
            time=0.0, name="r", layout={}, steps=30, start_step=20, versions={}
        ),
        faults=(),
        ledger=Ledger(seed=0, global_batch=1, lanes=1, samples=1),
    )
    membership = Membership(groups, Progress(generation=GENERATION, restore_step=20))
    records = RunLog(config, membership)
    dispatcher = Dispatcher(membership, records, lambda effects: None)
    receipts = Receipts(config, membership, dispatcher, records)
    restores = Restores(config, membership, dispatcher, records, receipts)
    yield Desk(store, paths, membership, receipts, restores)
    records.end("interrupted", None)


def test_a_damaged_one_is_given_up_once(desk: Desk) -> None:
    async def both_workers_say_so() -> None:
        reports = (desk.restores.failed(20, GENERATION, REASON, True) for _ in range(2))
        await asyncio.gather(*reports)
        await desk.restores.failed(10, GENERATION - 1, REASON, True)  # of a roster of the past

    assert desk.receipts.saved(20)
    asyncio.run(both_workers_say_so())
    assert (desk.membership.progress.restore_step, desk.membership.stopped) == (10, None)
    assert list_steps(desk.store, KEYS) == [10]
    assert desk.failed() == [20]
    assert not desk.receipts.saved(20), "the step can be committed again"


def test_one_that_is_out_of_reach_is_left_as_it_is(desk: Desk) -> None:
    asyncio.run(desk.restores.failed(20, GENERATION, "the bucket: access denied.", False))
    assert desk.membership.stopped is not None
    assert "access denied. Nothing was changed" in str(desk.membership.stopped.error)
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == [20]


@pytest.mark.parametrize(("snapshot", "left"), [(0, [10]), (15, [])])
def test_the_last_one_stays_unless_there_is_a_snapshot(
    desk: Desk, snapshot: int, left: list[int]
) -> None:
    desk.membership.progress.snapshotted(snapshot)
    for step in (20, 10):
        asyncio.run(desk.restores.failed(step, GENERATION, REASON, True))
    assert desk.membership.progress.restore_step == 0
    assert list_steps(desk.store, KEYS) == left
