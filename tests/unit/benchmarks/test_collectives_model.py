"""The model of `benchmarks.collectives`, worked out by hand for one cluster."""

from __future__ import annotations

import pytest

from benchmarks._collectives_model import (
    Fabric,
    forecast,
    ring_of_hops_s,
    ring_s,
    two_level_s,
)

SLOW = Fabric(alpha_s=1.0, inside_alpha_s=0.125, node_bytes_s=100.0, inside_bytes_s=1000.0)


def test_latencies_and_bytes_of_three_nodes_with_four_workers() -> None:
    across_s = 600 * 2 / 3 / 100
    assert ring_s(3, 4, 600, SLOW) == pytest.approx(11 * 1.0 + across_s)
    assert ring_of_hops_s(3, 4, 600, SLOW) == pytest.approx(2 * 1.0 + 9 * 0.125 + across_s)
    # The last of two rounds: half of what comes from three of four workers.
    last_s = 600 * 3 / 4 / 2 / 1000
    assert two_level_s(3, 4, 600, SLOW) == pytest.approx(2 * 1.0 + 3 * 0.125 + across_s + last_s)


def test_the_goal_on_1024_gpus() -> None:
    found = forecast(1024)
    for name in ("7b", "13b"):
        assert found[name]["all_gather"]["gain"] >= 1.8
        assert found[name]["block"]["gain"] >= 1.8
    # By the planner's facts: 1,023 x 20 µs, and 127 of 128 parts of 405 MB at 45 GB/s.
    assert found["7b"]["all_gather"]["flat_ms"] == pytest.approx(20.46 + 8.92, abs=0.02)
