"""Benchmarks of the trainer at their smallest: every row is there, and what does not depend on the
machine is as it should be."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.hosts import requires_hosts


def measured(*arguments: str) -> Any:
    """What a benchmark has printed last."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_activations_that_wait_on_the_host_take_less_of_the_device() -> None:
    rows = measured("benchmarks.offload", "--steps", "1")["rows"]
    assert len({row["loss"] for row in rows.values()}) == 1
    for kept in "recomputed", "kept":
        none, *others = [row for name, row in rows.items() if name.startswith(kept)]
        assert none["host_mb"] == 0 and len(others) == 3
        held = [row["device_mb"] for row in others]
        assert held == sorted(held) and held[-1] < none["device_mb"]


@pytest.mark.slow
@requires_hosts
@pytest.mark.timeout(600)
def test_two_levels_are_faster_than_a_ring_over_slow_links() -> None:
    result = measured("benchmarks.collectives", "--nodes", "2", "--turns", "3")
    assert result["nodes"]["2"]["two_level_s"] < result["nodes"]["2"]["flat_s"]
    assert set(result["forecast_1024"]) == {"7b", "13b", "70b"}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_activations_of_a_sequence_fall_with_each_degree() -> None:
    rows = measured("benchmarks.long_context", "--seq-len", "512")["layouts"]
    one = rows["one worker"]
    for kind in "context", "tensor":
        held = [rows[f"{kind} {degree}"]["activations_mb"] for degree in (2, 4)]
        assert one["activations_mb"] > held[0] > held[1]
    for row in rows.values():
        assert row["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert row["activations_mb"] == pytest.approx(row["foretold_mb"], rel=0.2)
