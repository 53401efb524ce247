"""A run whose last copy of the state is lost goes on from the snapshot in the nodes' memory.

The runs save nothing to the store before their end, so whatever they go on from was in memory. They
take a snapshot at HALF, and wait at a gate soon after it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointing import Keys, open_memory
from elastic.node.snapshot_survey import clear_snapshots, find_snapshot
from elastic.protocol.run_paths import RunPaths
from tests.support import ROOT
from tests.support.gated_run import HALF, gated_trainer, in_memory, saved_weights
from tests.support.tiny import numbers_of
from tests.support.watching import events_of, wait_until

DEADLINE_S = 120.0
STRAY = "a node of another day"
KILL = f"kill@{HALF + 1}:0"

Undisturbed = Callable[[int], str]


def restored(storage: Path) -> list[int]:
    """Steps at which the run went on after it had lost its state."""
    done = events_of(storage / "gated", "regroup_done")
    return [event["step"] for event in done if event["outcome"] == "restore"]


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.fixture(scope="module")
def undisturbed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    @functools.cache
    def run(shard: int) -> str:
        storage = tmp_path_factory.mktemp("undisturbed")
        (storage / "gate").touch()
        gated_trainer(str(storage), str(storage / "gate"), 1, shard=shard).fit()
        return saved_weights(storage / "gated" / "checkpoints")

    return run


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Where the snapshots of the test's run lie; nothing is left there in the end."""
    folder = RunPaths(root=tmp_path / "gated").memory
    assert not folder.exists()
    yield folder
    assert not folder.exists()


@contextlib.contextmanager
def gate_after_snapshot(
    gate: Path, memory: Path, first: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Opens the gate, which step HALF + 1 waits at, once the snapshot of HALF is in memory and
    `first` is done."""

    def open_gate() -> None:
        wait_until(lambda: list(memory.glob(f"*/{Keys().commit(HALF)}")))
        first()
        gate.touch()

    porter = threading.Thread(target=open_gate)
    porter.start()
    try:
        yield
    finally:
        porter.join()


@pytest.mark.parametrize("shard", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_only_replica_is_killed(
    undisturbed: Undisturbed, tmp_path: Path, memory: Path, shard: int
) -> None:
    gate, only_half = tmp_path / "gate", in_memory(HALF)
    trainer = gated_trainer(
        str(tmp_path), str(gate), 1, checkpoint=only_half, shard=shard, spares=1, faults=KILL
    )
    open_memory(memory, STRAY).put(Keys().commit(4), [b"whatever"])
    strays: list[bool] = []
    with gate_after_snapshot(gate, memory, lambda: strays.append((memory / STRAY).exists())):
        report = numbers_of(trainer.fit())
    assert strays == [False], "of a run whose directory was deleted, or set aside"
    assert (report["outcome"], report["faults_fired"]) == ("finished", 1)
    assert restored(tmp_path) == [HALF]
    assert report["lost_steps"] <= 1
    (taken,) = events_of(tmp_path / "gated", "snapshot_taken")
    assert (taken["step"], taken["copies"]) == (HALF, 1), "there is one node"
    assert saved_weights(tmp_path / "gated" / "checkpoints") == undisturbed(shard)


@pytest.mark.soak
def test_the_coordinator_dies_with_the_only_worker(
    undisturbed: Undisturbed, tmp_path: Path, memory: Path
) -> None:
    """A spare is there at once; it must not begin anew before the snapshot is found."""
    gate, root = tmp_path / "gate", tmp_path / "gated"

    def kill_both() -> None:
        pids = {e["worker"]: e["pid"] for e in events_of(root, "worker_joined")}
        (replica,) = events_of(root, "replica_forming")
        (started,) = events_of(root, "coordinator_started")
        for pid in (started["pid"], *(pids[worker] for worker in replica["workers"])):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: restored(tmp_path))

    trainer = gated_trainer(str(tmp_path), str(gate), 1, checkpoint=in_memory(HALF), spares=1)
    with gate_after_snapshot(gate, memory, kill_both):
        report = numbers_of(trainer.fit())
    assert report["outcome"] == "finished"
    assert [e["anew"] for e in events_of(root, "coordinator_started")] == [False, True]
    assert restored(tmp_path) == [HALF]
    assert saved_weights(tmp_path / "gated" / "checkpoints") == undisturbed(1)


@pytest.mark.soak
def test_a_damaged_snapshot_is_not_trusted(
    undisturbed: Undisturbed, tmp_path: Path, memory: Path
) -> None:
    gate, only_half = tmp_path / "gate", in_memory(HALF)

    def damage() -> None:
        (segment,) = memory.rglob(f"{HALF:012}-*/*.safetensors")
        flip_last_byte(segment)

    trainer = gated_trainer(
        str(tmp_path), str(gate), 1, checkpoint=only_half, spares=1, faults=KILL
    )
    with gate_after_snapshot(gate, memory, damage):
        report = numbers_of(trainer.fit())
    assert (report["outcome"], report["faults_fired"]) == ("finished", 1)
    (failed,) = events_of(tmp_path / "gated", "snapshot_failed")
    assert failed["step"] == HALF and "CRC32" in failed["reason"]
    assert restored(tmp_path) == [HALF, 0], "it was tried, and did not count"
    assert saved_weights(tmp_path / "gated" / "checkpoints") == undisturbed(1)


@pytest.mark.soak
def test_the_driver_and_the_whole_cluster_are_killed(
    undisturbed: Undisturbed, tmp_path: Path, memory: Path
) -> None:
    """Started again, on a cluster whose nodes have other names, the run goes on from memory."""
    gate = tmp_path / "gate"
    command = [
        sys.executable,
        "tests/support/gated_run.py",
        "local",
        str(tmp_path),
        str(gate),
        "1",
        str(HALF),
    ]
    paths = str(ROOT)
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    try:
        wait_until(lambda: process.poll() or list(memory.glob(f"*/{Keys().commit(HALF)}")))
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    workers = [event["pid"] for event in events_of(tmp_path / "gated", "worker_joined")]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert list(memory.iterdir()), "it outlives every process"
    gate.touch()
    report = numbers_of(
        gated_trainer(str(tmp_path), str(gate), 1, checkpoint=in_memory(HALF)).fit()
    )
    assert report["outcome"] == "finished"
    started = events_of(tmp_path / "gated", "run_started")
    assert [event["start_step"] for event in started] == [0, HALF]
    assert saved_weights(tmp_path / "gated" / "checkpoints") == undisturbed(1)


def test_a_run_without_records_does_not_go_on_from_memory(
    cluster: None, tmp_path: Path, memory: Path
) -> None:
    """Somebody deleted the run directory, or it was set aside. Or it is not mounted where the
    driver looks: then the start is refused, and the run that goes on needs what lies there."""
    paths = RunPaths(root=tmp_path / "gated")
    open_memory(memory, STRAY).put(Keys().commit(4), [b"whatever"])
    assert find_snapshot(paths) is None
    assert (memory / STRAY).exists()
    clear_snapshots(paths)


@pytest.mark.soak
def test_a_node_is_lost_with_its_memory(
    undisturbed: Undisturbed, tmp_path: Path, memory: Path
) -> None:
    """Its shard is read from the copy on another node."""
    command = [sys.executable, "tests/support/node_loss_run.py", str(tmp_path)]
    paths = str(ROOT)
    output = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        timeout=2 * DEADLINE_S,
        check=True,
    ).stdout
    report = json.loads(output.splitlines()[-1])
    assert report["outcome"] == "finished" and report["lost_steps"] <= 1
    (taken,) = events_of(tmp_path / "gated", "snapshot_taken")
    assert (taken["step"], taken["copies"]) == (HALF, 2)
    assert restored(tmp_path) == [HALF]
    assert saved_weights(tmp_path / "gated" / "checkpoints") == undisturbed(2)
