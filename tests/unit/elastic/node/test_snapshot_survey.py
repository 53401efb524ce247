"""When nobody needs a run's snapshots any more: where a checkpoint holds its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import Stock, open_store
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.snapshots import Snapshots
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.node import snapshot_survey
from elastic.node.snapshot_survey import end_is_stored
from elastic.protocol.events import RunEnded, RunOutcome
from elastic.protocol.messages import Stop
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import EventLog
from tests.support.coordinator_desk import CoordinatorDesk
from tests.support.tiny_checkpoint import NUMBERS, write_state

RUN = RunIdentity(id="this run")
SAVED, SNAPSHOT = 500, 990


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path / "run")


def save(paths: RunPaths, step: int, run: str = RUN.id) -> None:
    state = {**NUMBERS, "run": {"name": "run", "id": run}}
    write_state(open_store(paths.checkpoints), {"w": torch.ones(2)}, step=step, state=state)


def end(paths: RunPaths, outcome: RunOutcome, step: int) -> None:
    with EventLog(paths.events) as log:
        log.append(RunEnded(time=1.0, step=step, outcome=outcome, error=None))


def test_damaged_records_and_a_storage_that_refuses_end_nothing(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that is started anew asks what the nodes hold; the run is well."""
    nothing: Any = None
    snapshots = Snapshots(
        paths, Progress(), nothing, nothing, versions={}, found=nothing, timeout_s=1.0
    )
    bounds = list[float]()

    def survey(ask: object, folder: str, *args: object, timeout_s: float) -> dict[str, Stock]:
        bounds.append(timeout_s)
        return {}

    monkeypatch.setattr(snapshot_survey, "live_nodes", tuple)
    monkeypatch.setattr(snapshot_survey, "on_every_node", survey)
    end(paths, "failed", SAVED)
    with paths.events.open("a") as file:
        file.write("damaged\n")
    asyncio.run(snapshots.look_again())
    paths.events.unlink()
    paths.events.mkdir()
    asyncio.run(snapshots.look_again())
    assert bounds == [10.0, 10.0], "whatever the run's own bounds: each node starts a process"


def test_a_run_that_is_stopped_before_anyone_holds_state_keeps_its_snapshots(
    paths: RunPaths,
) -> None:
    """It has been started again, from a snapshot that is newer than the last checkpoint."""
    config = CoordinatorDesk(paths.root).config
    save(paths, SAVED)
    started = Membership(config.groups, Progress(restore_step=SAVED, snapshot_step=SNAPSHOT))
    started.wind_down()
    started.advance()
    assert started.stopped == Stop(error=None)
    RunLog(config, started).end("finished", None).result()
    assert not end_is_stored(paths, RUN)


def test_a_run_whose_end_is_saved_needs_none(paths: RunPaths) -> None:
    assert not end_is_stored(paths, RUN)
    end(paths, "stopped", SNAPSHOT)
    assert not end_is_stored(paths, RUN), "nothing is saved"
    save(paths, SNAPSHOT, run="another run")
    assert not end_is_stored(paths, RUN), "that is another run's"
    save(paths, SNAPSHOT + 1)
    assert end_is_stored(paths, RUN)


@pytest.mark.parametrize(
    ("outcome", "stored"),
    [("finished", True), ("stopped", True), ("failed", False), ("interrupted", False)],
)
def test_what_has_not_ended_well_may_go_on_from_any_of_them(
    paths: RunPaths, outcome: RunOutcome, stored: bool
) -> None:
    save(paths, SAVED)
    end(paths, outcome, SAVED)
    assert end_is_stored(paths, RUN) is stored
