"""A worker that freezes, with its connections open, is found and replaced within moments, and the
run ends with the weights of an undisturbed one."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointing import CheckpointConfig
from tests.support.tiny import Outcome, fit, tiny_trainer
from tests.support.watching import events_of, steps_of, wait_until

STEPS, FREEZE_AFTER = 90, 5
DETECTION_S = 2.0

Run = Callable[..., Outcome]


class Freezer(threading.Thread):
    """Stops a worker's process once the run has come to step `FREEZE_AFTER`."""

    def __init__(self, root: Path, *, spare: bool) -> None:
        super().__init__(daemon=True)
        self.root, self.spare = root, spare
        self.worker, self.time = "", 0.0

    def run(self) -> None:
        wait_until(lambda: steps_of(self.root) >= FREEZE_AFTER)
        events = events_of(self.root)
        placed = {w for e in events if e["kind"] == "replica_forming" for w in e["workers"]}
        pids = {e["worker"]: e["pid"] for e in events if e["kind"] == "worker_joined"}
        self.worker = next(w for w in pids if (w in placed) is not self.spare)
        self.time = time.time()
        os.kill(pids[self.worker], signal.SIGSTOP)


@pytest.fixture(scope="module")
def undisturbed(
    cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Outcome]:
    storage = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(
        lambda: fit(tiny_trainer(text, storage, shard=2, replicas=1, steps=STEPS))
    )


@pytest.mark.parametrize(
    ("replicas", "spare"),
    [
        pytest.param(1, False, id="one_replica", marks=pytest.mark.soak),
        pytest.param(2, False, id="two_replicas", marks=pytest.mark.soak),
        pytest.param(2, True, id="spare", marks=pytest.mark.soak),
    ],
)
def test_a_frozen_worker(
    undisturbed: Callable[[], Outcome], text: Path, tmp_path: Path, replicas: int, spare: bool
) -> None:
    freezer = Freezer(tmp_path / "run", spare=spare)
    freezer.start()
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            shard=2,
            replicas=replicas,
            spares=1,
            steps=STEPS,
            checkpoint=CheckpointConfig(every_steps=30),
        )
    )
    lost = events_of(tmp_path / "run", "worker_lost")
    assert [(e["worker"], e["cause"]) for e in lost] == [(freezer.worker, "hang")]
    assert "stopped by a signal" in lost[0]["detail"]
    assert 0 < lost[0]["time"] - freezer.time < DETECTION_S
    kept = {path.name for path in (tmp_path / "run" / "incidents").glob(f"*/{freezer.worker}.*")}
    assert kept >= {f"{freezer.worker}.txt", f"{freezer.worker}.log"}
    whole = undisturbed()
    assert broken.params == whole.params
    assert broken.samples == whole.samples
    assert broken.losses == whole.losses
