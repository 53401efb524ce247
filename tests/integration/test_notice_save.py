"""A notice for the last machine that holds the state has a checkpoint written at once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from tiny import fit, tiny_trainer
from watching import events_of, steps_of, wait_until

STEPS, NOTICE_AFTER = 150, 5


@pytest.mark.slow
def test_the_only_worker_is_told_to_go(cluster: None, text: Path, tmp_path: Path) -> None:
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
