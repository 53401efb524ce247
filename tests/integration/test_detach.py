"""A run is not left to a cluster that ends with the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

PROGRAM = """
import sys
from tests.support.gated_run import gated_trainer
gated_trainer(sys.argv[1], sys.argv[1] + "/gate", 1).fit(detach=True)
"""


def test_a_cluster_that_fit_would_start(tmp_path: Path) -> None:
    """In a process that finds none."""
    known = {"RAY_ADDRESS", "RAY_TMPDIR"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in known} | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 93, done.stderr
    assert "detach = True: the run would end with this program, which starts" in done.stderr
    assert not list(tmp_path.iterdir())
    assert "Started a local Ray instance" not in done.stderr
