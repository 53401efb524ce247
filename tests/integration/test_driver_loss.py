"""The run belongs to the cluster: drivers come and go, a supervisor is started anew, and in the end
nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from checkpointing import CheckpointConfig
from elastic import ConfigError, HealthConfig, OptimizerConfig
from elastic.cli.main import main
from elastic.driver import launch, resume
from elastic.driver.running import find_run
from elastic.errors import RunGoesOnError
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.cluster import NAMESPACE, named_actors
from tests.support import ROOT
from tests.support.gated_run import HALF, STEPS, Steady, gated_trainer, saved_weights
from tests.support.tiny import numbers_of
from tests.support.watching import actor_beside, events_of, wait_until


@pytest.fixture(scope="module")
def undisturbed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    storage = tmp_path_factory.mktemp("undisturbed")
    gate = storage / "gate"
    gate.touch()
    gated_trainer(str(storage), str(gate), 2).fit()
    return saved_weights(storage / "gated" / "checkpoints")


@contextlib.contextmanager
def driver(storage: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A driver whose run has come to the gate."""
    address = ray.get_runtime_context().gcs_address
    arguments = [address, str(storage), str(storage / "gate"), "2"]
    process = subprocess.Popen(
        [sys.executable, "tests/support/gated_run.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        wait_until((storage / "gated" / "checkpoints" / "m" / f"{HALF:012}.json").exists)
        yield process
    finally:
        process.kill()
        process.wait()


def is_left(storage: Path) -> list[str]:
    """What the run has on the cluster."""
    key = RunPaths(root=storage / "gated").key
    groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return named_actors(key) + [name for name in groups if name.startswith(key)]


def supervisor_pid(storage: Path) -> int:
    """Its process; raises AssertionError where there is none now."""
    (started, *_) = events_of(storage / "gated", "coordinator_started")
    return actor_beside(started["pid"], "Supervisor")


def test_the_driver_is_killed_and_the_same_command_attaches(
    undisturbed: str, tmp_path: Path
) -> None:
    with driver(tmp_path) as process:
        process.kill()
        process.wait()
        assert is_left(tmp_path)
        again = gated_trainer(str(tmp_path), str(tmp_path / "gate"), 2)
        again.health = HealthConfig(max_hangs=3)
        with pytest.raises(ConfigError, match=r"max_hangs = 3: .* going on, with 10"):
            again.fit()
        again.health = HealthConfig()
        (tmp_path / "gate").touch()
        report = numbers_of(again.fit())
    assert (report["outcome"], report["steps"], report["lost_steps"]) == ("finished", STEPS, 0)
    assert len(events_of(tmp_path / "gated", "run_started")) == 1
    assert not events_of(tmp_path / "gated", "worker_lost")
    assert saved_weights(tmp_path / "gated" / "checkpoints") == undisturbed
    wait_until(lambda: not is_left(tmp_path))


@pytest.mark.soak
def test_a_job_that_is_stopped_saves_without_its_driver(undisturbed: str, tmp_path: Path) -> None:
    """`ray job stop` sends SIGTERM and kills what is there 3 s later: here the run stands still all
    that time."""
    with driver(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: bool(events_of(tmp_path / "gated", "stop_requested")))
        process.kill()
        process.wait()
        (tmp_path / "gate").touch()
        wait_until(lambda: events_of(tmp_path / "gated")[-1]["kind"] == "run_ended")
    ended = events_of(tmp_path / "gated")[-1]
    assert ended["outcome"] == "stopped" and HALF < ended["step"] < STEPS
    assert not events_of(tmp_path / "gated", "worker_lost")
    wait_until(lambda: not is_left(tmp_path))
    report = json.loads((tmp_path / "gated" / "report.json").read_text())
    assert report["outcome"] == "stopped", "the supervisor has written it"
    again = numbers_of(gated_trainer(str(tmp_path), str(tmp_path / "gate"), 2).fit())
    assert again["outcome"] == "finished"
    assert [e["start_step"] for e in events_of(tmp_path / "gated", "run_started")] == [
        0,
        ended["step"],
    ]
    assert saved_weights(tmp_path / "gated" / "checkpoints") == undisturbed


@pytest.mark.parametrize("loses_a_worker", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_supervisor_that_is_killed_is_started_anew(
    undisturbed: str, tmp_path: Path, loses_a_worker: bool
) -> None:
    """It takes the workers up as they are; one that ends thereafter is replaced."""
    with driver(tmp_path) as process:
        before = supervisor_pid(tmp_path)
        os.kill(before, signal.SIGKILL)
        joined = events_of(tmp_path / "gated", "worker_joined")
        wait_until(lambda: is_anew(tmp_path, before))
        if loses_a_worker:
            os.kill(joined[0]["pid"], signal.SIGKILL)
            wait_until(lambda: len(events_of(tmp_path / "gated", "worker_joined")) > len(joined))
        (tmp_path / "gate").touch()
        assert process.wait(120) == 0
    lost = [event["pid"] for event in events_of(tmp_path / "gated", "worker_lost")]
    assert lost == ([joined[0]["pid"]] if loses_a_worker else [])
    ended = events_of(tmp_path / "gated")[-1]
    assert (ended["outcome"], ended["step"]) == ("finished", STEPS)
    assert saved_weights(tmp_path / "gated" / "checkpoints") == undisturbed
    wait_until(lambda: not is_left(tmp_path))


def is_anew(storage: Path, before: int) -> bool:
    with contextlib.suppress(AssertionError):
        return supervisor_pid(storage) != before
    return False


@pytest.mark.slow
def test_a_run_that_nobody_waits_for(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started with `detach`, shown by `elastic attach`, and stopped by `elastic stop`, where the
    module of the user's schedule is not found."""
    gate, root = tmp_path / "gate", tmp_path / "gated"
    trainer = gated_trainer(str(tmp_path), str(gate), 1)
    trainer.train = replace(trainer.train, optimizer=OptimizerConfig(schedule=Steady(1e-2)))
    started = trainer.fit(detach=True)
    assert started.path == str(root) and started.metrics is None
    address = ray.get_runtime_context().gcs_address

    def elastic(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "elastic.cli.main", *arguments, "--address", address],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    wait_until((root / "checkpoints" / "m" / f"{HALF:012}.json").exists)
    leaves, stays = elastic("attach", str(root)), elastic("attach", str(root))
    stops = elastic("stop", str(root))
    wait_until(lambda: bool(events_of(root, "stop_requested")))
    assert find_run(RunPaths(root=root)) is not None
    assert leaves.stdout is not None and leaves.stdout.readline()
    leaves.send_signal(signal.SIGINT)
    assert leaves.wait(60) == 128 + signal.SIGINT
    gate.touch()
    assert stops.wait(60) == 0 and stays.wait(60) == 0
    assert stays.stdout is not None and "gated: stopped" in stays.stdout.read()
    wait_until(lambda: not is_left(tmp_path))
    assert main(["stop", str(root), "--address", address]) == 2
    assert "no run is going on in" in (said := capsys.readouterr().err)
    assert "it was stopped after" in said and "report.txt" in said


@pytest.mark.soak
def test_what_is_left_of_a_run_whose_actors_are_ended_by_hand(
    undisturbed: str, tmp_path: Path
) -> None:
    """The workers end by themselves; the next start of the run takes away the rest, and goes on."""
    gate, paths = tmp_path / "gate", RunPaths(root=tmp_path / "gated")
    gated_trainer(str(tmp_path), str(gate), 2).fit(detach=True)
    wait_until((paths.root / "checkpoints" / "m" / f"{HALF:012}.json").exists)
    joined = events_of(paths.root, "worker_joined")
    pids = [supervisor_pid(tmp_path), *(worker["pid"] for worker in joined)]
    for name in named_actors(paths.key):
        if "worker" not in name:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert is_left(tmp_path), "its placement groups"
    gate.touch()
    report = numbers_of(gated_trainer(str(tmp_path), str(gate), 2).fit())
    assert report["outcome"] == "finished"
    assert saved_weights(paths.root / "checkpoints") == undisturbed
    wait_until(lambda: not is_left(tmp_path))


@pytest.mark.soak
def test_what_lives_on_without_a_supervisor_is_ended_before_a_state_is_looked_for(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it trains on, and commits what the new start does not know of."""
    gate, paths = tmp_path / "gate", RunPaths(root=tmp_path / "gated")
    gated_trainer(str(tmp_path), str(gate), 2).fit(detach=True)
    wait_until((paths.root / "checkpoints" / "m" / f"{HALF:012}.json").exists)
    ray.kill(ray.get_actor(paths.key, namespace=NAMESPACE))
    wait_until(lambda: find_run(paths) is None)
    assert is_left(tmp_path)
    find_stored = resume.find_stored

    def looks(*arguments: Any) -> Any:
        wait_until(lambda: not is_left(tmp_path))
        gate.touch()
        return find_stored(*arguments)

    monkeypatch.setattr(launch, "find_stored", looks)
    report = numbers_of(gated_trainer(str(tmp_path), str(gate), 2).fit())
    assert report["outcome"] == "finished"
    assert [e["start_step"] for e in events_of(paths.root, "run_started")] == [0, HALF]
    assert saved_weights(paths.root / "checkpoints") == undisturbed


@pytest.mark.soak
def test_a_run_that_has_just_been_started_is_not_moved_by_a_second_start(
    cluster: None, tmp_path: Path
) -> None:
    """Nobody holds its lock until its supervisor is there, and it has no records yet."""
    gate, paths = tmp_path / "gate", RunPaths(root=tmp_path / "gated")
    anew = CheckpointConfig(every_steps=HALF, resume="never")
    gated_trainer(str(tmp_path), str(gate), 1, checkpoint=anew).fit(detach=True)
    again = gated_trainer(str(tmp_path), str(gate), 1, checkpoint=anew)
    with contextlib.suppress(RunGoesOnError):  # it attaches where the first one was quick
        again.fit(detach=True)
    assert not list(tmp_path.glob("gated.before-*"))
    gate.touch()
    wait_until(lambda: bool(events_of(paths.root, "run_ended")))
    assert len(events_of(paths.root, "run_started")) == 1
    wait_until(lambda: not is_left(tmp_path))


def test_a_stop_in_the_first_moment_of_a_run_is_heeded(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor has been asked for, and takes seconds to answer the first question."""
    call, asked = Remote.call, list[str]()

    def interrupted(run: Any, method: Any, *arguments: Any) -> Any:
        if not asked and method.__qualname__.startswith("SupervisorApi."):
            asked.append(method.__name__)
            signal.raise_signal(signal.SIGINT)
        return call(run, method, *arguments)

    monkeypatch.setattr(Remote, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gated_trainer(str(tmp_path), str(tmp_path / "gate"), 1).fit()
    assert asked
    (ended,) = events_of(tmp_path / "gated", "run_ended")
    assert (ended["outcome"], ended["step"]) == ("stopped", 0)
    wait_until(lambda: not is_left(tmp_path))
