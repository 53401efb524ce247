from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from elastic.protocol.causes import CRASH
from elastic.protocol.events import (
    Evaluated,
    Event,
    RegroupCalled,
    RegroupDone,
    RunStarted,
    StepRecord,
    WorkerLost,
)
from elastic.reporting.picture import draw
from elastic.reporting.report import build_report


def run_with(step_count: int, crashes: int) -> tuple[list[Event], list[StepRecord]]:
    events: list[Event] = [
        RunStarted(time=0.0, name="r", layout={"replicas": 2}, steps=step_count, start_step=0,
                   versions={}),
        Evaluated(time=5.0, step=5, val_loss=1.5, tokens=1),
    ]  # fmt: skip
    for i in range(crashes):
        at = 2.2 + i
        events += [
            WorkerLost(time=at, worker="w", node="n", pid=1, slot="replica 1 shard 0 tensor 0",
                       cause=CRASH, detail=""),
            RegroupCalled(time=at + 0.1, generation=i + 2, reason="fault"),
            RegroupDone(time=at + 0.2, generation=i + 2, step=2 + i, replicas=1, lanes={},
                        renumbered={}, outcome="repeat", lost_steps=0, repeated_steps=1),
        ]  # fmt: skip
    steps = [
        StepRecord(step=i, loss=5.0 / (i + 1), grad_norm=1.0, lr=1e-3, tokens=1, time=1.0 + i,
                   generation=1, replicas=2 - i % 2, sample_digests=[])
        for i in range(step_count)
    ]  # fmt: skip
    return events, steps


@pytest.mark.parametrize(("step_count", "crashes"), [(0, 0), (1, 0), (30, 3), (200, 20)])
def test_a_picture_of_the_promised_size(tmp_path: Path, step_count: int, crashes: int) -> None:
    events, steps = run_with(step_count, crashes)
    report = build_report(events, steps)
    assert len(report.incidents) == crashes
    path = draw(tmp_path, report, steps, events)
    assert imread(path).shape[:2] == (700, 1200)
    assert list(tmp_path.iterdir()) == [path]


def test_an_incident_shows(tmp_path: Path) -> None:
    def red_pixels(crashes: int) -> int:
        events, steps = run_with(30, crashes)
        image = imread(draw(tmp_path, build_report(events, steps), steps, events))
        return int(((image[..., 0] > 0.6) & (image[..., 1] < 0.4) & (image[..., 2] < 0.4)).sum())

    assert red_pixels(crashes=0) == 0
    assert red_pixels(crashes=1) > 300  # a line of the panels' height
