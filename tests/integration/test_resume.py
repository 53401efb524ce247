"""A run that was stopped goes on where its newest checkpoint is, to the same weights, in any
layout."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig

from checkpointing import CheckpointConfig, Keys, newest, open_store
from elastic import Callback, ConfigError, ElasticTrainer, ParallelConfig
from elastic.driver.resume import run_directory
from elastic.reporting.report import Report
from tests.support import ROOT
from tests.support.gated_run import HALF, gated_trainer, saved_weights
from tests.support.tiny import Outcome, fit, numbers_of, tiny_task, tiny_trainer

DEADLINE_S = 120.0


def weights_of(storage: Path) -> str:
    where = storage / "gated" / "checkpoints"
    manifest = newest(open_store(where), Keys())
    assert manifest is not None
    return saved_weights(where, manifest.step)


def wait_until(what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert process.poll() is None, f"the run ended by itself, exit status {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def unstopped(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    storage = tmp_path_factory.mktemp("unstopped")

    @functools.cache
    def run() -> str:
        gate = storage / "gate"
        gate.touch()
        gated_trainer(str(storage), str(gate), 2).fit()
        return weights_of(storage)

    return run


@pytest.mark.parametrize(
    ("before", "after", "number", "signals"),
    [
        pytest.param(2, 1, signal.SIGTERM, 1, marks=pytest.mark.soak),
        pytest.param(1, 2, signal.SIGINT, 2, marks=pytest.mark.soak),
    ],
)
def test_stopped_at_half_and_started_again(
    unstopped: Callable[[], str],
    tmp_path: Path,
    before: int,
    after: int,
    number: signal.Signals,
    signals: int,
) -> None:
    """By the first signal after the step that is under way, which is saved; by the second at
    once."""
    gate, root = tmp_path / "gate", tmp_path / "gated"
    address = ray.get_runtime_context().gcs_address
    command = [
        sys.executable,
        "tests/support/gated_run.py",
        address,
        str(tmp_path),
        str(gate),
        str(before),
    ]
    paths = str(ROOT)
    said = tmp_path / "said"
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stderr=said.open("w")
    )
    manifest = root / "checkpoints" / "m" / f"{HALF:012}.json"
    wait_until(manifest.exists, process)
    events = root / "events.jsonl"
    process.send_signal(number)
    wait_until(lambda: '"stop_requested"' in events.read_text(), process)
    if signals == 2:
        process.send_signal(number)
    else:
        gate.touch()
    assert process.wait(DEADLINE_S) == 128 + number, said.read_text()
    if number == signal.SIGINT:
        assert said.read_text().endswith("KeyboardInterrupt\n"), said.read_text()
    report = json.loads((root / "report.json").read_text())
    assert report["outcome"] == ("interrupted" if signals == 2 else "stopped")
    assert report["incidents"] == [], "the ends of its workers are no losses"
    assert signals == 2 or report["steps"] > HALF + 1
    saved = HALF if signals == 2 else report["steps"]
    gate.touch()
    result = gated_trainer(str(tmp_path), str(gate), after).fit()
    assert numbers_of(result)["outcome"] == "finished"
    started = [
        json.loads(line) for line in events.read_text().splitlines() if '"run_started"' in line
    ]
    assert [event["start_step"] for event in started] == [0, saved]
    numbers = numbers_of(result)
    assert (numbers["restarts"], numbers["redone_steps"]) == (1, report["steps"] - saved)
    assert weights_of(tmp_path) == unstopped()


@pytest.fixture(scope="module")
def finished(
    cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """A finished run of six steps with all its checkpoints, for tests to copy."""
    storage = tmp_path_factory.mktemp("finished")
    return storage, fit(six_steps(text, storage))


def six_steps(text: Path, storage: Path, **changes: Any) -> ElasticTrainer:
    keep_all = CheckpointConfig(every_steps=2, keep_last=10)
    return tiny_trainer(text, storage, **{"steps": 6, "checkpoint": keep_all, **changes})


def cut_back(storage: Path, steps: int) -> None:
    """Takes away the checkpoints of the steps after `steps`, as if the run had stopped there."""
    for manifest in (storage / "run" / "checkpoints" / "m").iterdir():
        if int(manifest.stem) > steps:
            manifest.unlink()


@pytest.mark.soak
def test_a_relative_storage_path_is_the_drivers(
    cluster: None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = tiny_trainer(text, Path("runs"), steps=3, replicas=1).fit()
    assert numbers_of(result)["outcome"] == "finished"
    assert result.path == str(tmp_path / "runs" / "run")


@pytest.mark.slow
def test_continues_in_other_layouts(
    finished: tuple[Path, Outcome], text: Path, tmp_path: Path
) -> None:
    """Degrees change the order of float32 sums: losses agree to about 1e-5."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    cut_back(tmp_path, 2)
    fit(six_steps(text, tmp_path, replicas=1, parallel=ParallelConfig(shard=2, context=2)))
    cut_back(tmp_path, 4)
    outcome = fit(six_steps(text, tmp_path, replicas=1, tensor=2))
    assert outcome.losses == pytest.approx(finished[1].losses, rel=5e-5)
    assert outcome.samples == finished[1].samples


def test_continues_with_more_replicas_than_lanes(
    finished: tuple[Path, Outcome], text: Path, tmp_path: Path
) -> None:
    """The run keeps its two lanes; the third replica computes none, and has the same weights."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    cut_back(tmp_path, 2)
    outcome = fit(six_steps(text, tmp_path, replicas=3, lanes=None))
    assert (outcome.params, outcome.losses) == (finished[1].params, finished[1].losses)
    assert outcome.report["replicas_equal"] is True


def test_never_starts_anew_and_keeps_the_earlier_run(
    finished: tuple[Path, Outcome], text: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    anew = CheckpointConfig(resume="never")
    again = fit(six_steps(text, tmp_path, replicas=1, seed=4, checkpoint=anew))
    assert again.params != finished[1].params
    (aside,) = tmp_path.glob("run.before-*")
    assert (aside / "report.json").exists()


def test_a_finished_run_is_not_run_again(
    finished: tuple[Path, Outcome], text: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    events = tmp_path / "run" / "events.jsonl"
    records, ends = events.read_bytes(), []

    class Ends(Callback):
        def on_end(self, report: Report) -> None:
            ends.append(report.outcome)

    shutil.rmtree(tmp_path / ".data")
    without_data = tiny_task(tmp_path / "no text")
    second = fit(six_steps(text, tmp_path, task=without_data, device="cuda", callbacks=(Ends(),)))
    assert (second.params, second.losses) == (finished[1].params, finished[1].losses)
    assert events.read_bytes() == records, "nothing was started"
    assert ends == ["finished"]


def test_refuses_another_model_and_other_data(
    finished: tuple[Path, Outcome], text: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    wider = six_steps(text, tmp_path, task=tiny_task(text, intermediate_size=96))
    with pytest.raises(ConfigError, match=r"another model.*mlp.*\[32, 96\]"):
        wider.fit()
    other = six_steps(text, tmp_path, task=tiny_task(text, rms_norm_eps=1e-3))
    with pytest.raises(ConfigError, match=r"rms_norm_eps = 0\.001': .*it is another model"):
        other.fit()
    with pytest.raises(ConfigError, match=r"train\.seed = 9: .* continued has 3, .*Use 3"):
        six_steps(text, tmp_path, seed=9).fit()
    with pytest.raises(ConfigError, match=r"train\.global_batch = 16: .* has 8, "):
        six_steps(text, tmp_path, global_batch=16).fit()
    with pytest.raises(ConfigError, match=r"train\.steps = 4: .* has done 6 steps already"):
        six_steps(text, tmp_path, steps=4).fit()
    with pytest.raises(ConfigError, match=r"train\.lanes = 4: .* has 2, "):
        six_steps(text, tmp_path, lanes=4).fit()


def test_must_resume_needs_a_checkpoint(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in"):
        tiny_trainer(text, tmp_path, checkpoint=CheckpointConfig(resume="must")).fit()


def test_a_run_that_is_going_on_is_not_started_twice(text: Path, tmp_path: Path) -> None:
    with (
        run_directory(RunConfig(name="run", storage_path=str(tmp_path)), CheckpointConfig()),
        pytest.raises(ConfigError, match="a run of this name is going on"),
    ):
        tiny_trainer(text, tmp_path).fit()
