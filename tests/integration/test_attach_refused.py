"""What a command about a run says where the cluster, or the run's directory, refuses it: one line,
and status 2. 1 would say that the run has failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray

from elastic.cli.main import main
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.cluster import end_actors, start_actor
from tests.support import ROOT
from tests.support.run_end import Broken


@pytest.mark.parametrize("address", ["10.0.0.1", "http://127.0.0.1:8265"])
def test_an_address_that_is_none(address: str, tmp_path: Path) -> None:
    """In a process that has joined no cluster."""
    command = [sys.executable, "-m", "elastic.cli.main", "stop", str(tmp_path)]
    done = subprocess.run(
        [*command, "--address", address], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"elastic: --address = '{address}': it cannot be joined: ")
    assert said.endswith("Use HOST:PORT of its head, here or as RAY_ADDRESS, and its versions.")


def test_a_call_that_fails(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(root=tmp_path / "run")
    start_actor(Broken, max_concurrency=10, name=paths.key)(None)
    address = ray.get_runtime_context().gcs_address
    assert main(["stop", str(paths.root), "--address", address]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("elastic: ") and "its disk is full" in said
    end_actors(paths.key)


def test_records_that_are_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text("no record\n")
    assert main(["logs", str(tmp_path)]) == 2
    assert "events.jsonl" in capsys.readouterr().err
