"""The examples, run as a reader would run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import ROOT


def run(example: str, storage: Path, *arguments: str) -> dict[str, Any]:
    """Runs an example on a cluster of its own, and returns what it prints last."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, f"examples/{example}", "--storage", str(storage), *arguments],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    result: dict[str, Any] = json.loads(last.removeprefix("RESULT "))
    return result


def test_bring_your_own_model_learns_through_a_fault(tmp_path: Path) -> None:
    result = run("custom_task.py", tmp_path, "--fault", "kill@20")
    assert (result["faults_fired"], result["lost_steps"]) == (1, 0)
    assert result["final_loss"] < 0.5 * result["first_loss"]


def test_quickstart_says_what_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "examples/quickstart.py",
            "--global-batch",
            "15",
            "--storage",
            str(tmp_path),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "ConfigError: train.global_batch = 15: 2 lanes x 1 shard ranks" in done.stderr
    assert "Traceback" not in done.stderr
