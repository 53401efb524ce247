"""Workers that are told to end: SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from elastic import ScalingConfig
from tests.support.gated_run import saved_weights
from tests.support.growing_run import STEPS as LONG
from tests.support.growing_run import growing_trainer
from tests.support.tiny import fit, numbers_of, tiny_trainer
from tests.support.watching import events_of, steps_of, wait_until

STEPS, NOTICE_AFTER = 150, 5


@pytest.mark.slow
def test_the_only_worker_has_a_checkpoint_written_at_once(
    cluster: None, text: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    told: list[int] = []

    def tell() -> None:
        wait_until(lambda: steps_of(root) >= NOTICE_AFTER)
        (pid,) = [e["pid"] for e in events_of(root, "worker_joined")]
        os.kill(pid, signal.SIGTERM)
        told.append(pid)

    teller = threading.Thread(target=tell)
    teller.start()
    outcome = fit(tiny_trainer(text, tmp_path, steps=STEPS, replicas=1))
    teller.join()
    assert outcome.report["outcome"] == "finished" and told
    (notice,) = events_of(root, "draining")
    first, last = events_of(root, "checkpoint_committed")
    assert NOTICE_AFTER < first["step"] < last["step"] == STEPS
    assert first["time"] > notice["time"]


@pytest.mark.soak
def test_a_spare_takes_over_from_the_only_worker_with_nothing_repeated(
    cluster: None, tmp_path: Path
) -> None:
    root, gate = tmp_path / "run", tmp_path / "gate"
    told: list[str] = []

    def tell() -> None:
        wait_until(lambda: len(events_of(root, "worker_joined")) == 2 and steps_of(root) > 0)
        (replica,) = events_of(root, "replica_forming")
        pids = {e["worker"]: e["pid"] for e in events_of(root, "worker_joined")}
        (worker,) = replica["workers"]
        os.kill(pids[worker], signal.SIGTERM)
        told.append(worker)
        wait_until(lambda: len(events_of(root, "worker_joined")) == 3)
        gate.touch()

    teller = threading.Thread(target=tell)
    teller.start()
    sizes = ScalingConfig(max_replicas=1, spares=1)
    report = numbers_of(growing_trainer(str(tmp_path), str(gate), sizes, 1).fit())
    teller.join()
    assert report["outcome"] == "finished"
    first, successor, *_ = events_of(root, "replica_forming")
    assert first["workers"] == told and (first["replica"], successor["replica"]) == (0, 1)
    _, joined, took_over = events_of(root, "regroup_done")
    assert [(e["outcome"], e["repeated_steps"]) for e in (joined, took_over)] == [
        ("boundary", 0),
        ("boundary", 0),
    ]
    assert joined["lanes"]["1"] == [] and took_over["lanes"].keys() == {"0"}
    assert (joined["renumbered"], took_over["renumbered"]) == ({}, {"1": 0})
    (lost,) = events_of(root, "worker_lost")
    assert (lost["worker"], lost["cause"], lost["slot"]) == (told[0], "preemption", None)
    whole = ScalingConfig(max_replicas=1)
    growing_trainer(str(tmp_path), str(gate), whole, 1, name="whole").fit()
    weights = [saved_weights(tmp_path / name / "checkpoints", LONG) for name in ("run", "whole")]
    assert weights[0] == weights[1]
