"""The uploader is killed or frozen in a run on two replicas, which share the writing: the next save
succeeds, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import ray

from benchmarks._chaos_left import find_left_behind
from checkpointing import CheckpointConfig, Keys, load_manifest, open_store
from checkpointing.format.layout import rank_of
from tests.support.gated_run import HALF, STEPS, gated_trainer, saved_weights
from tests.support.tiny import numbers_of
from tests.support.watching import events_of, wait_until


def alive(actor: str) -> list[int]:
    """Processes of the actors of that class."""
    rows = ray._private.state.actors().values()
    return [r["Pid"] for r in rows if r["ActorClassName"] == actor and r["State"] == "ALIVE"]


def weights_of(root: Path, step: int = STEPS) -> str:
    store = open_store(root / "checkpoints")
    manifest = load_manifest(store, Keys(), step)
    assert {rank_of(key) for key in manifest.segments} == {0, 1}, "both replicas wrote"
    return saved_weights(root / "checkpoints", step)


def committed(root: Path) -> list[int]:
    return [e["step"] for e in events_of(root, "checkpoint_committed")]


@pytest.fixture(scope="module")
def killed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose uploader is killed after the checkpoint of HALF."""
    storage = tmp_path_factory.mktemp("killed")
    root, gate, found = storage / "gated", storage / "gate", []

    def kill() -> None:
        wait_until((root / "checkpoints" / Keys().commit(HALF)).exists)
        found.extend(alive("Uploader"))
        os.kill(found[0], signal.SIGKILL)
        gate.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    report = numbers_of(gated_trainer(str(storage), str(gate), 2).fit())
    killer.join()
    assert report["outcome"] == "finished" and len(found) == 1
    return root


@pytest.mark.slow
def test_the_uploader_is_killed(killed: Path) -> None:
    assert committed(killed) == [HALF, STEPS]
    assert not events_of(killed, "worker_lost")
    assert weights_of(killed, HALF) != weights_of(killed)
    assert find_left_behind(killed) == []


@pytest.mark.slow
def test_both_helpers_are_frozen(killed: Path, tmp_path: Path) -> None:
    """Nothing answers a call to them any more, and nothing fails one. The last save and the last
    snapshot need them."""
    root, gate = tmp_path / "gated", tmp_path / "gate"

    def freeze() -> None:
        wait_until(lambda: committed(root) and events_of(root, "snapshot_taken"))
        for pid in (*alive("Uploader"), *alive("SnapshotHolder")):
            os.kill(pid, signal.SIGSTOP)
        gate.touch()

    freezer = threading.Thread(target=freeze)
    freezer.start()
    both = CheckpointConfig(every_steps=HALF, memory_every=HALF)
    report = numbers_of(gated_trainer(str(tmp_path), str(gate), 2, checkpoint=both).fit())
    freezer.join()
    assert report["outcome"] == "finished" and not events_of(root, "worker_lost")
    assert committed(root) == [HALF, STEPS] and weights_of(root) == weights_of(killed)
    ended = events_of(root, "helper_killed")
    assert {e["helper"] for e in ended} == {"uploader", "snapshot holder"}
    assert all("stopped by a signal" in e["detail"] for e in ended)
    assert find_left_behind(root) == []


@pytest.mark.slow
def test_saves_by_the_clock(killed: Path, tmp_path: Path) -> None:
    """The lead's clock decides which steps are saved, with both replicas, and no weight by that."""
    (tmp_path / "gate").touch()
    often = CheckpointConfig(every_steps="auto", auto_least_s=0.01, auto_most_s=0.05)
    gated_trainer(str(tmp_path), str(tmp_path / "gate"), 2, checkpoint=often).fit()
    steps = committed(tmp_path / "gated")
    assert len(steps) > 1 and steps[-1] == STEPS
    assert weights_of(tmp_path / "gated") == weights_of(killed)


@pytest.mark.slow
def test_a_writer_dies_before_the_last_copy(killed: Path, tmp_path: Path) -> None:
    """Replica 1 shares the last save and is lost before it has copied: replica 0 writes it all."""
    (tmp_path / "gate").touch()
    faults = f"kill@{STEPS}.checkpoint:1"
    report = numbers_of(
        gated_trainer(str(tmp_path), str(tmp_path / "gate"), 2, faults=faults).fit()
    )
    root = tmp_path / "gated"
    assert (report["outcome"], report["faults_fired"]) == ("finished", 1)
    assert committed(root)[-1] == STEPS  # that of HALF may have waited for the uploader to start
    store = open_store(root / "checkpoints")
    manifest = load_manifest(store, Keys(), STEPS)
    assert {rank_of(key) for key in manifest.segments} == {0}
    assert saved_weights(root / "checkpoints") == weights_of(killed)
    assert find_left_behind(root) == []
