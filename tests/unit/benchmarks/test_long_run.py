"""The long run, made short: every worker is replaced many times, and the records tell all of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.soak
def test_a_run_outlives_all_its_workers() -> None:
    """In a process of its own: it makes a coordinator, which takes a driver's Ray for its own."""
    command = [sys.executable, "-m", "benchmarks.long_run", "--steps", "600", "--incidents", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["steps"], found["incidents"]) == (600, 60)
    assert found["replay_s"] > 0 and found["report_s"] > 0
