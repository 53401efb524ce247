"""What a supervisor does for those who wait for the end of its run; without Ray."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths, hold_run
from elastic.supervisor import supervisor
from elastic.supervisor.supervisor import Supervisor
from tests.support.run_plan import run_plan

PATIENCE_S = 20.0


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path / "run")


def start(paths: RunPaths) -> Supervisor:
    kept: Any = SimpleNamespace(value=run_plan(paths, Remote(None)))
    return Supervisor(kept)


def test_a_clearing_up_that_fails_keeps_nobody_waiting(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is held by others, Ray is gone, and the records are damaged."""
    left = threading.Event()

    def refuse(prefix: str) -> None:
        raise ConnectionError("the head of the cluster is gone")

    monkeypatch.setattr(supervisor, "end_all", refuse)
    monkeypatch.setattr(supervisor, "end_own_actor", left.set)
    monkeypatch.setattr(supervisor, "_HANDOVER_S", 0.0)
    monkeypatch.setattr(supervisor, "LINGER_S", 0.0)
    paths.root.mkdir()
    paths.events.write_text("no record\n")
    with hold_run(paths):
        ending = asyncio.run(asyncio.wait_for(start(paths).ending(), PATIENCE_S))
    assert ending.error is not None and "is locked" in ending.error
    assert left.wait(PATIENCE_S)
