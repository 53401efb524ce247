"""The long run, made short: every worker is replaced many times, and the records tell all of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.long_run import coordinator_config, live_through
from elastic.coordinator.replay import replay
from elastic.driver.observer import conclude

STEPS, INCIDENTS = 600, 60


def test_a_run_outlives_all_its_workers(tmp_path: Path) -> None:
    config = coordinator_config(STEPS, tmp_path)
    asyncio.run(live_through(config, INCIDENTS))
    known = replay(config.paths, 0)
    assert known.recorded == STEPS
    assert known.started - len(known.workers) == INCIDENTS
    report = conclude(config.paths)
    assert (report.steps, len(report.incidents)) == (STEPS, INCIDENTS)
    assert {incident.outcome for incident in report.incidents} == {"boundary"}
    assert report.ledger_steps is None, "its ledger is checked step by step, and it did not finish"
