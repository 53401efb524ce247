"""What a run has ended with stands, whatever becomes of its picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.protocol.events import Event, RunEnded, RunStarted, StepRecord
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.conclusion import conclude
from tests.support import ROOT


def finished_run(root: Path, name: str) -> RunPaths:
    paths = RunPaths(root=root)
    events: list[Event] = [
        RunStarted(time=0.0, name=name, layout={"replicas": 1}, steps=2, start_step=0, versions={}),
        RunEnded(time=9.0, outcome="finished", step=2, error=None),
    ]
    steps = [
        StepRecord(step=i, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=1, time=1.0 + i,
                   generation=1, replicas=1, sample_digests=[])
        for i in range(2)
    ]  # fmt: skip
    paths.events.write_text("".join(f"{json.dumps(event.to_json())}\n" for event in events))
    paths.steps.write_text("".join(f"{json.dumps(step.to_json())}\n" for step in steps))
    return paths


def test_a_name_is_no_formula(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = finished_run(tmp_path, "a$5_$6")
    assert conclude(paths).name == "a$5_$6"
    assert (tmp_path / "run.png").exists() and not caplog.records


def test_a_matplotlib_that_does_not_work_costs_the_picture_alone(tmp_path: Path) -> None:
    """A setting for another version, or of another environment."""
    finished_run(tmp_path, "r")
    ends = """
import sys
from pathlib import Path
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.conclusion import conclude
print(conclude(RunPaths(root=Path(sys.argv[1]))).outcome)
"""
    done = subprocess.run(
        [sys.executable, "-c", ends, str(tmp_path)],
        cwd=ROOT, env={**os.environ, "MPLBACKEND": "Qt4Agg"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "finished\n", done.stderr
    assert "the run has no picture: ValueError(" in done.stderr
    assert (tmp_path / "report.txt").exists() and not (tmp_path / "run.png").exists()
