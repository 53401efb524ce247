"""The coordinator is killed while the workers train: no step stops, and the one that is started in
its place goes on with what they know."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import Outcome, fit, tiny_trainer

STEPS, KILL_AFTER = 90, 5
DEADLINE_S = 120.0


def records(path: Path) -> list[dict[str, Any]]:
    """Whole records of a file that is being written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class CoordinatorKiller(threading.Thread):
    """Kills the run's coordinator once `after` steps are recorded."""

    def __init__(self, root: Path, after: int) -> None:
        super().__init__(daemon=True)
        self.root, self.after, self.time = root, after, 0.0

    def run(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(records(self.root / "steps.jsonl")) < self.after:
            assert time.monotonic() < deadline, "the run did not get that far"
            time.sleep(0.01)
        started = [e for e in records(self.root / "events.jsonl") if "anew" in e]
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
    happened = records(tmp_path / "run" / "events.jsonl")
    (anew,) = [e for e in happened if e["kind"] == "coordinator_started" and e["anew"]]
    assert anew["time"] > killer.time > 0
    between = [e for e in happened if killer.time < e["time"] < anew["time"] + 1]
    assert not [e for e in between if e["kind"] in ("worker_lost", "regroup_done")], (
        "a step stopped"
    )
    lost = [e for e in happened if e["kind"] == "worker_lost"]
    assert len(lost) == (faults != "none")
