"""What recomputation and a chunked loss save shows in the benchmark, and that they change no
loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.activations import CHANGES, PLAIN, TOLERANCE, differences, measure, settings
from trainer.parallel.compiled import CACHE

pytestmark = pytest.mark.soak


def test_a_recomputed_step_with_a_chunked_loss_takes_less_and_learns_the_same() -> None:
    (plain, expected), (small, found) = (
        measure(settings(2, CHANGES[name]), 2) for name in (PLAIN, "full, chunked")
    )
    assert small["peak_mb"] < 0.5 * plain["peak_mb"]
    assert all(abs(row["peak_mb"] / row["foretold_mb"] - 1) < 0.1 for row in (plain, small))
    assert max(differences(found, expected).values()) < TOLERANCE
    assert expected[0].loss != expected[1].loss


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_a_budget_of_compiled_blocks_takes_less_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    (whole, expected), (half, found) = (
        measure(settings(4, CHANGES[name]), 2) for name in ('compile="require"', "0.5, compiled")
    )
    assert half["peak_mb"] < 0.9 * whole["peak_mb"]
    assert max(differences(found, expected).values()) < TOLERANCE
