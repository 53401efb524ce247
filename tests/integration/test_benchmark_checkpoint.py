"""`python -m benchmarks.checkpoint` at its smallest: every number is there, and those that do not
depend on the machine are what they should be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import ROOT

KEYS = {
    "stall_vs_dcp_save",
    "stall_vs_memcpy",
    "upload_vs_s5cmd",
    "upload_vs_dcp_s3torchconnector",
    "checksum_share",
    "bytes_written_ratio",
    "reshard_read_ratio",
    "replan_ratio",
    "throttled_ratio",
    "peak_extra_bytes_ratio",
    "peer_heal_store_requests",
    "detail",
}


@pytest.mark.soak  # the first time it installs its peers
@pytest.mark.timeout(900)
def test_the_benchmark_of_checkpoints_measures_everything() -> None:
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--size-mib", "64", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == KEYS
    assert set(result["reshard_read_ratio"]) == {"4->3", "4->6", "8->5"}
    assert result["peer_heal_store_requests"] == 0
    assert result["detail"]["heal"]["restore_requests"] > 0
    assert result["detail"]["injected_503"] > 0
    assert 1 <= result["bytes_written_ratio"] < 1.01
    assert all(row["total_s"] > 0 for row in result["detail"]["saves"].values())
