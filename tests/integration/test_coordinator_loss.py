"""The coordinator is killed or frozen while the workers train: no step stops, the one that is
started in its place goes on with what they know, and callbacks miss nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic import Callback
from elastic.driver import launch
from elastic.protocol.events import Event, StepRecord
from elastic.protocol.pulse import read_pulse
from elastic.reporting.report import Report
from tests.support.stuck_coordinator import StuckCoordinator
from tests.support.tiny import Outcome, fit, tiny_trainer
from tests.support.watching import events_of, steps_of, wait_until

STEPS, KILL_AFTER = 90, 5


class CoordinatorKiller(threading.Thread):
    """Sends the run's coordinator a signal once `due`; looks every `pause_s`."""

    def __init__(
        self,
        root: Path,
        due: Callable[[], bool],
        *,
        number: int = signal.SIGKILL,
        pause_s: float = 0.01,
    ) -> None:
        super().__init__(daemon=True)
        self.root, self.due, self.number = root, due, number
        self.pause_s, self.time = pause_s, 0.0

    def run(self) -> None:
        wait_until(self.due, pause_s=self.pause_s)
        started = events_of(self.root, "coordinator_started")
        self.time = time.time()
        os.kill(started[-1]["pid"], self.number)


class Diary(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.steps_at_end = 0

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def on_event(self, event: Event) -> None:
        self.events.append(event.to_json())

    def on_end(self, report: Report) -> None:
        self.reports.append(report.to_json())
        self.steps_at_end = len(self.steps)


class Broken(Callback):
    """Has a bug."""

    steps = 0

    def on_step(self, record: StepRecord) -> None:
        self.steps += 1
        raise ValueError("a bug of the user's")


@pytest.fixture(scope="module")
def undisturbed(cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return fit(tiny_trainer(text, tmp_path_factory.mktemp("undisturbed"), steps=STEPS, replicas=1))


@pytest.mark.parametrize(
    ("number", "faults"),
    [
        (signal.SIGKILL, "none"),
        pytest.param(signal.SIGKILL, f"kill@{STEPS - 5}:1", marks=pytest.mark.soak),
        pytest.param(signal.SIGSTOP, f"kill@{STEPS - 5}:1", marks=pytest.mark.slow),
    ],
    ids=["quiet", "and_a_worker_later", "frozen_and_a_worker_later"],
)
def test_the_coordinator_is_lost(
    undisturbed: Outcome, text: Path, tmp_path: Path, number: int, faults: str
) -> None:
    root = tmp_path / "run"
    killer = CoordinatorKiller(root, lambda: steps_of(root) >= KILL_AFTER, number=number)
    killer.start()
    diary, buggy = Diary(), Broken()
    broken = fit(
        tiny_trainer(text, tmp_path, steps=STEPS, spares=1, faults=faults, callbacks=(buggy, diary))
    )
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
    assert diary.steps == list(range(STEPS))
    assert diary.events == happened
    assert diary.reports == [broken.report]
    assert diary.steps_at_end == STEPS
    assert buggy.steps == 1
    pulse = read_pulse(root / "pulse.json")
    assert pulse is not None and pulse.time > anew["time"] and pulse.steps == STEPS


@pytest.mark.soak
def test_the_coordinator_s_event_loop_is_stuck(
    undisturbed: Outcome, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed, as one that a signal has stopped, and no step stops."""
    monkeypatch.setattr(launch, "Coordinator", StuckCoordinator)
    stuck = fit(tiny_trainer(text, tmp_path, steps=STEPS, spares=1))
    assert (stuck.params, stuck.samples) == (undisturbed.params, undisturbed.samples)
    assert stuck.losses == undisturbed.losses
    happened = events_of(tmp_path / "run")
    assert [e["anew"] for e in happened if e["kind"] == "coordinator_started"] == [False, True]
    assert [e["kind"] for e in happened].count("regroup_done") == 1, "a step stopped"
    assert not [e for e in happened if e["kind"] == "worker_lost"]


@pytest.fixture(scope="module")
def sharded(cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    storage = tmp_path_factory.mktemp("sharded")
    return fit(tiny_trainer(text, storage, steps=STEPS, replicas=2, shard=2))


@pytest.mark.soak
@pytest.mark.parametrize("attempt", range(12))
def test_the_coordinator_is_killed_while_it_hands_out_a_roster(
    sharded: Outcome, text: Path, tmp_path: Path, attempt: int
) -> None:
    """As soon as the roster is in the records, which is just before the answers leave: some of them
    are lost with it, each time others."""
    root = tmp_path / "run"
    events = root / "events.jsonl"
    killer = CoordinatorKiller(
        root,
        lambda: events.exists() and events.read_bytes().count(b'"regroup_done"') == 2,
        pause_s=0.0002,
    )
    killer.start()
    broken = fit(
        tiny_trainer(text, tmp_path, steps=STEPS, replicas=2, shard=2, spares=2, faults="kill@9:1")
    )
    assert (broken.params, broken.samples) == (sharded.params, sharded.samples)
    assert broken.losses == sharded.losses
    happened = events_of(root)
    (anew,) = [e for e in happened if e["kind"] == "coordinator_started" and e["anew"]]
    assert anew["time"] > killer.time > 0
    assert [e["cause"] for e in happened if e["kind"] == "worker_lost"] == ["crash"]
    assert "restore" not in [e["outcome"] for e in happened if e["kind"] == "regroup_done"]
