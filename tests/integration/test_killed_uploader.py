"""The uploader is killed in a run on two replicas, which share the writing: the next save succeeds,
and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import ray
from gated_run import HALF, STEPS, gated_trainer
from watching import events_of, wait_until

from benchmarks._chaos_run import find_left_behind
from checkpointing import Keys, Reader, load_manifest, open_store, params_sha256
from checkpointing.layout import rank_of


def uploaders() -> list[int]:
    """Processes of the uploaders that live."""
    rows = ray._private.state.actors().values()
    return [r["Pid"] for r in rows if r["ActorClassName"] == "Uploader" and r["State"] == "ALIVE"]


def test_the_uploader_is_killed(cluster: None, tmp_path: Path) -> None:
    root, gate, killed = tmp_path / "gated", tmp_path / "gate", []
    before = {name for name in os.listdir("/dev/shm") if "elastic" in name}

    def kill() -> None:
        wait_until((root / "checkpoints" / Keys().commit(HALF)).exists)
        killed.extend(uploaders())
        os.kill(killed[0], signal.SIGKILL)
        gate.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    report = gated_trainer(str(tmp_path), str(gate), 2).fit().metrics
    killer.join()
    assert report["outcome"] == "finished" and len(killed) == 1
    committed = [e["step"] for e in events_of(root) if e["kind"] == "checkpoint_committed"]
    assert committed == [HALF, STEPS]
    assert not [e for e in events_of(root) if e["kind"] == "worker_lost"]
    store = open_store(root / "checkpoints")
    for step in committed:
        manifest = load_manifest(store, Keys(), step)
        assert {rank_of(key) for key in manifest.segments} == {0, 1}, "both replicas wrote"
        assert params_sha256(Reader(store, manifest), sorted(manifest.tensors))
    assert find_left_behind(root) == []
    assert {name for name in os.listdir("/dev/shm") if "elastic" in name} == before
