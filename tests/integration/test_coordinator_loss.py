"""The coordinator is killed while the workers train: no step stops, and the one that is started in
its place goes on with what they know."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny import Outcome, fit, tiny_trainer
from watching import events_of, steps_of, wait_until

STEPS, KILL_AFTER = 90, 5


class CoordinatorKiller(threading.Thread):
    """Kills the run's coordinator once `after` steps are recorded."""

    def __init__(self, root: Path, after: int) -> None:
        super().__init__(daemon=True)
        self.root, self.after, self.time = root, after, 0.0

    def run(self) -> None:
        wait_until(lambda: steps_of(self.root) >= self.after)
        started = [e for e in events_of(self.root) if "anew" in e]
        self.time = time.time()
        os.kill(started[-1]["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return fit(tiny_trainer(text, tmp_path_factory.mktemp("undisturbed"), steps=STEPS, replicas=1))


@pytest.mark.parametrize(
    "faults",
    ["none", pytest.param(f"kill@{STEPS - 5}:1", marks=pytest.mark.soak)],
    ids=["quiet", "and_a_worker_later"],
)
def test_the_coordinator_is_killed(
    undisturbed: Outcome, text: Path, tmp_path: Path, faults: str
) -> None:
    killer = CoordinatorKiller(tmp_path / "run", KILL_AFTER)
    killer.start()
    broken = fit(tiny_trainer(text, tmp_path, steps=STEPS, spares=1, faults=faults))
    assert (broken.params, broken.samples) == (undisturbed.params, undisturbed.samples)
    assert broken.losses == undisturbed.losses
    happened = events_of(tmp_path / "run")
    (anew,) = [e for e in happened if e["kind"] == "coordinator_started" and e["anew"]]
    assert anew["time"] > killer.time > 0
    between = [e for e in happened if killer.time < e["time"] < anew["time"] + 1]
    assert not [e for e in between if e["kind"] in ("worker_lost", "regroup_done")], (
        "a step stopped"
    )
    lost = [e for e in happened if e["kind"] == "worker_lost"]
    assert len(lost) == (faults != "none")
