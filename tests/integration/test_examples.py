"""The examples, run as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.exit_status import RETRY_IS_USELESS
from tests.support import ROOT
from tests.support.tiny import write_text


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


@pytest.mark.soak
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
    assert done.returncode == RETRY_IS_USELESS
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: train.global_batch = 15: 2 lanes x 1 shard ranks" in last


@pytest.mark.slow
def test_the_example_of_the_front_page_trains(tmp_path: Path) -> None:
    """Whole, as a script of a user; only the places and the length of the run are others."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    runs = tmp_path / "runs"
    others = {
        '"/data/text"': repr(str(write_text(tmp_path / "text"))),
        '"/data/runs"': repr(str(runs)),
        "steps=1000": "steps=40",
        "every_steps=100": "every_steps=20",
    }
    for written, other in others.items():
        assert written in example
        example = example.replace(written, other)
    (tmp_path / "script.py").write_text(example)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    val_loss, path = done.stdout.split()[-2:]
    assert float(val_loss) < 5 and path == str(runs / "my-run")
    report = json.loads((runs / "my-run" / "report.json").read_text())
    assert (report["outcome"], report["steps"]) == ("finished", 40)
