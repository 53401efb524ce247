"""What a supervisor does for those who wait for the end of its run; without Ray."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from checkpointing import CheckpointConfig
from elastic.protocol.events import RunEnded, RunStarted, SnapshotTaken, StepRecord
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths, hold_run
from elastic.protocol.supervisor_api import Ending
from elastic.reporting.conclusion import recorded_ending
from elastic.reporting.event_log import EventLog, last_event
from elastic.supervisor import supervisor
from elastic.supervisor.supervisor import Supervisor
from tests.support.run_plan import run_plan

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def outside_a_cluster(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No actor is there to be ended. Set when the supervisor would end its own."""
    left = threading.Event()
    monkeypatch.setattr(supervisor, "end_all", lambda prefix: None)
    monkeypatch.setattr(supervisor, "end_own_actor", left.set)
    monkeypatch.setattr(supervisor, "started_anew", lambda: False)
    monkeypatch.setattr(supervisor, "LINGER_S", 0.0)
    return left


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path / "run")


def test_one_started_anew_where_the_storage_is_not_mounted_ends_no_run(paths: RunPaths) -> None:
    unmounted = RunPaths(root=paths.root / "unmounted" / "run")
    with supervisor._hold(unmounted, anew=True):
        assert not unmounted.lock.exists()
    with pytest.raises(FileNotFoundError), supervisor._hold(unmounted, anew=False):
        pass


def test_whether_the_run_has_ended_is_not_known_while_the_storage_refuses(
    paths: RunPaths,
) -> None:
    paths.events.mkdir(parents=True)
    assert supervisor._find_end(paths, 0.0) is None


def start(paths: RunPaths) -> Supervisor:
    kept: Any = SimpleNamespace(value=run_plan(paths, Remote(None)))
    return Supervisor(kept)


def test_a_clearing_up_that_fails_keeps_nobody_waiting(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, outside_a_cluster: threading.Event
) -> None:
    """The lock is held by others, Ray is gone, and the records are damaged."""

    def refuse(prefix: str) -> None:
        raise ConnectionError("the head of the cluster is gone")

    monkeypatch.setattr(supervisor, "end_all", refuse)
    monkeypatch.setattr(supervisor, "_HANDOVER_S", 0.0)
    paths.root.mkdir()
    paths.events.write_text("no record\n")
    with hold_run(paths):
        ending = asyncio.run(start(paths).ending(PATIENCE_S))
    assert ending is not None and ending.error is not None and "is locked" in ending.error
    assert outside_a_cluster.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("memory_every", "earlier", "asks"),
    [(None, False, False), (None, True, True), (10, False, True)],
)
def test_nodes_are_asked_to_clear_where_some_start_of_the_run_kept_snapshots(
    paths: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    outside_a_cluster: threading.Event,
    memory_every: int | None,
    earlier: bool,
    asks: bool,
) -> None:
    """One that hangs holds up the end of no other run, and one with much to delete has its time."""
    asked: list[RunPaths] = []
    monkeypatch.setattr(supervisor, "_HANDOVER_S", 0.0)
    monkeypatch.setattr(supervisor, "end_is_stored", lambda *_: True)
    monkeypatch.setattr(supervisor, "clear_snapshots", asked.append)
    plan = run_plan(paths, Remote(None))
    checkpoint = CheckpointConfig(memory_every=memory_every)
    kept: Any = SimpleNamespace(value=replace(plan, job=replace(plan.job, checkpoint=checkpoint)))
    paths.root.mkdir()
    if earlier:
        with EventLog(paths.events) as log:
            log.append(
                SnapshotTaken(time=1.0, step=4, generation=1, bytes=8, copies=2, seconds=1.0)
            )
    with hold_run(paths):
        assert asyncio.run(Supervisor(kept).ending(PATIENCE_S)) is not None
    assert asked == [paths] * asks
    assert outside_a_cluster.wait(PATIENCE_S)  # else it would start Ray here, for its own actor


class Gone(Remote[Any]):
    """A coordinator that was ended for good."""

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        raise ActorDiedError


@pytest.mark.parametrize("began", [1.0, 2.0])
def test_a_run_whose_coordinator_was_ended_has_its_end_in_the_records(
    paths: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    outside_a_cluster: threading.Event,
    began: float,
) -> None:
    """Else its driver takes it for done, and whoever watches it for dead. A start
    that the records do not know has no end in them."""

    def train(of_run: Supervisor) -> Ending:
        of_run._interrupted = True
        return Ending(error="the coordinator died")

    monkeypatch.setattr(Supervisor, "_train", train)
    monkeypatch.setattr(supervisor, "draining_nodes", dict)
    started = RunStarted(time=1.0, name="r", layout={}, steps=9, start_step=0, versions={})
    step = StepRecord(
        step=4, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, time=3.0, generation=1, replicas=1,
        sample_digests=[1],
    )  # fmt: skip
    with EventLog(paths.events) as log, EventLog(paths.steps) as steps:
        log.append(started)
        steps.append(step)
    kept: Any = SimpleNamespace(value=replace(run_plan(paths, Gone(None)), began=began))
    ending = asyncio.run(Supervisor(kept).ending(PATIENCE_S))
    assert ending == Ending(error=None, interrupted=True)
    last = last_event(paths.events)
    if began == started.time:
        assert isinstance(last, RunEnded)
        assert (last.outcome, last.step, last.error) == ("interrupted", 5, None)
        assert recorded_ending(paths) == ending
    else:
        assert last == started
    assert outside_a_cluster.wait(PATIENCE_S)


def test_whoever_waits_for_the_end_keeps_no_call_for_longer_than_said(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, outside_a_cluster: threading.Event
) -> None:
    monkeypatch.setattr(supervisor, "_HANDOVER_S", 1.0)

    async def ask(asked: Supervisor) -> None:
        calls = await asyncio.gather(*(asked.ending(0.0) for _ in range(3)))
        assert calls == [None, None, None] and await asked.going_on()
        first, second = await asyncio.gather(asked.ending(PATIENCE_S), asked.ending(PATIENCE_S))
        assert first is not None and first == second == await asked.ending(0.0)

    with hold_run(paths):
        asyncio.run(ask(start(paths)))
    assert outside_a_cluster.wait(PATIENCE_S)
