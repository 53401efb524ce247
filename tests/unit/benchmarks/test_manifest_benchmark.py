"""The commit record of a small model on few workers: all that the benchmark measures is there."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support import ROOT


def test_a_record_is_small_read_and_planned_by() -> None:
    command = [sys.executable, "-m", "benchmarks.manifest", "--workers", "16", "--layers", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["slices"] == 3 * 12 * 16  # kinds × tensors × workers; the segments bound is far
    assert 0 < found["bytes"] < 100 * found["slices"] + 100_000
    assert all(found[key] > 0 for key in ("read_s", "memory_bytes", "plan_s", "commit_s"))
