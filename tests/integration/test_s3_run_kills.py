"""A run with its checkpoints on S3 loses a worker while the part that it has copied is on its way,
or its coordinator while the commit is: the save is there all the same, and the weights are those of
an undisturbed run. A store that refuses a coordinator that is started anew costs it time alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing import (
    Keys,
    S3Config,
    Store,
    list_steps,
    open_store,
    verify_checkpoint,
)
from tests.support import ROOT
from tests.support.fakes.s3_faults import FaultServer, Rule
from tests.support.fakes.s3_server import BUCKET, faulty_s3_server
from tests.support.gated_run import HALF, STEPS, gated_trainer, saved_weights
from tests.support.watching import events_of, stop_at_once, wait_until

pytestmark = pytest.mark.timeout(600)

DEADLINE_S = 240.0


@pytest.fixture
def faults() -> Iterator[FaultServer]:
    with faulty_s3_server() as server:
        yield server


@pytest.fixture
def config(faults: FaultServer) -> S3Config:
    return S3Config(url=f"s3://{BUCKET}/base", endpoint_url=faults.url, timeout_s=30)


@pytest.fixture
def run(config: S3Config, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two replicas of one worker; the second half waits for tmp_path/gate."""
    where = [config.url, str(config.endpoint_url), str(tmp_path), str(tmp_path / "gate")]
    paths = str(ROOT)
    process = subprocess.Popen(
        [sys.executable, "tests/support/s3_run.py", *where, "2", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
    )
    yield process
    if process.poll() is None:
        stop_at_once(process, tmp_path / "gated")  # it ends its cluster
        process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def undisturbed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    storage = tmp_path_factory.mktemp("undisturbed")
    (storage / "gate").touch()
    gated_trainer(str(storage), str(storage / "gate"), 2).fit()
    return saved_weights(storage / "gated" / "checkpoints")


def check_all(store: Store, steps: list[int]) -> None:
    assert list_steps(store, Keys()) == steps
    assert all(verify_checkpoint(store, Keys(), step).findings == () for step in steps)


def await_request(rule: Rule, run: subprocess.Popen[bytes], times: int = 1) -> None:
    wait_until(lambda: rule.fired >= times or run.poll() is not None, DEADLINE_S)
    assert run.poll() is None


def finish(run: subprocess.Popen[bytes], storage: Path) -> None:
    (storage / "gate").touch()
    assert run.wait(DEADLINE_S) == 0


def saves(storage: Path) -> list[tuple[str, int]]:
    ended = events_of(storage / "gated", "checkpoint_committed", "checkpoint_skipped")
    return [(e["kind"], e["step"]) for e in ended]


@pytest.mark.soak
def test_a_worker_is_killed_while_its_part_is_on_its_way(
    undisturbed: str,
    config: S3Config,
    faults: FaultServer,
    run: subprocess.Popen[bytes],
    tmp_path: Path,
) -> None:
    rule = faults.inject("delay", kind="put", prefix="base/gated/d/", times=2)
    await_request(rule, run, times=2)  # a part of each replica
    store = open_store(config.below("gated"))
    check_all(store, [])
    joined = events_of(tmp_path / "gated", "worker_joined")
    os.kill(joined[0]["pid"], signal.SIGKILL)
    wait_until(lambda: events_of(tmp_path / "gated", "worker_lost"), DEADLINE_S)
    check_all(store, [])
    rule.gate.set()
    wait_until(lambda: saves(tmp_path), DEADLINE_S)
    assert saves(tmp_path) == [("checkpoint_committed", HALF)]
    check_all(store, [HALF])
    finish(run, tmp_path)
    assert saves(tmp_path)[-1] == ("checkpoint_committed", STEPS)
    assert len(events_of(tmp_path / "gated", "worker_lost")) == 1
    check_all(store, [HALF, STEPS])
    assert saved_weights(config.below("gated")) == undisturbed


@pytest.mark.parametrize(
    "fate",
    [pytest.param("lost", marks=pytest.mark.soak), pytest.param("done", marks=pytest.mark.slow)],
)
def test_the_coordinator_is_killed_as_it_commits(
    fate: str,
    undisturbed: str,
    config: S3Config,
    faults: FaultServer,
    run: subprocess.Popen[bytes],
    tmp_path: Path,
) -> None:
    """`fate`: of the conditional PUT of the commit record, which the store holds meanwhile."""
    record = f"base/gated/{Keys().commit(HALF)}"
    rule = faults.inject("delay", kind="put", prefix=record)
    await_request(rule, run)
    store = open_store(config.below("gated"))
    check_all(store, [])
    (first,) = events_of(tmp_path / "gated", "coordinator_started")
    os.kill(first["pid"], signal.SIGKILL)
    rule.over = fate == "lost"
    rule.gate.set()
    assert rule.left.wait(60)
    wait_until(lambda: len(events_of(tmp_path / "gated", "coordinator_started")) == 2, DEADLINE_S)
    wait_until(lambda: saves(tmp_path), DEADLINE_S)
    assert saves(tmp_path) == [("checkpoint_committed", HALF)]
    check_all(store, [HALF])
    finish(run, tmp_path)
    assert not events_of(tmp_path / "gated", "worker_lost")
    check_all(store, [HALF, STEPS])
    assert saved_weights(config.below("gated")) == undisturbed


@pytest.mark.soak
def test_the_store_refuses_a_coordinator_started_anew(
    undisturbed: str,
    config: S3Config,
    faults: FaultServer,
    run: subprocess.Popen[bytes],
    tmp_path: Path,
) -> None:
    """As with credentials that have expired, until they are renewed."""
    wait_until(lambda: saves(tmp_path) or run.poll() is not None, DEADLINE_S)
    rule = faults.inject("error", kind="list", times=None, status=403, code="ExpiredToken")
    (first,) = events_of(tmp_path / "gated", "coordinator_started")
    os.kill(first["pid"], signal.SIGKILL)
    await_request(rule, run, times=3)
    (tmp_path / "gate").touch()  # no step waits for it
    faults.clear()
    assert run.wait(DEADLINE_S) == 0
    assert [e["anew"] for e in events_of(tmp_path / "gated", "coordinator_started")] == [
        False,
        True,
    ]
    assert not events_of(tmp_path / "gated", "worker_lost")
    assert saves(tmp_path) == [("checkpoint_committed", HALF), ("checkpoint_committed", STEPS)]
    check_all(open_store(config.below("gated")), [HALF, STEPS])
    assert saved_weights(config.below("gated")) == undisturbed
