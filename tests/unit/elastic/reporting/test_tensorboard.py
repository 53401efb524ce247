from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic.protocol.events import Evaluated, StepRecord
from elastic.reporting.report import build_report
from elastic.reporting.tensorboard import TensorBoardLog
from tests.support.watching import wait_until

REPORT = build_report([], [])


def step_record(step: int, time: float, loss: float) -> StepRecord:
    return StepRecord(
        step=step, loss=loss, grad_norm=0.5, lr=0.25, tokens=100, time=time, generation=1,
        replicas=2, sample_digests=[],
    )  # fmt: skip


def readable(path: Path, name: str) -> list[tuple[int, float]]:
    try:
        return curve(path, name)
    except KeyError:  # no point of it yet
        return []


def curve(path: Path, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    return [(e.step, e.value) for e in accumulator.Scalars(name)]


def test_every_curve_is_written(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.on_step(step_record(0, 10.0, 4.0))
    log.on_step(step_record(1, 12.0, 3.0))
    log.on_event(Evaluated(time=12.5, step=2, val_loss=3.5, tokens=10))
    # readable while the log is open
    wait_until(lambda: readable(tmp_path, "loss") == [(0, 4.0), (1, 3.0)], 30.0, pause_s=0.1)
    log.on_end(REPORT)
    assert curve(tmp_path, "grad_norm") == [(0, 0.5), (1, 0.5)]
    assert curve(tmp_path, "lr") == [(0, 0.25), (1, 0.25)]
    assert curve(tmp_path, "replicas") == [(0, 2.0), (1, 2.0)]
    assert curve(tmp_path, "tokens_per_s") == [(1, 50.0)]
    assert curve(tmp_path, "val_loss") == [(2, 3.5)]


@pytest.mark.parametrize("new_log", [False, True], ids=["went back", "continued"])
def test_steps_done_again_replace_the_lost_ones(tmp_path: Path, new_log: bool) -> None:
    log = TensorBoardLog(tmp_path)
    for step in range(4):
        log.on_step(step_record(step, 10.0 + step, 4.0))
    if new_log:
        log.on_end(REPORT)
        log = TensorBoardLog(tmp_path)
    for step in range(2, 4):
        log.on_step(step_record(step, 20.0 + step, 2.0))
    log.on_end(REPORT)
    assert curve(tmp_path, "loss") == [(0, 4.0), (1, 4.0), (2, 2.0), (3, 2.0)]
