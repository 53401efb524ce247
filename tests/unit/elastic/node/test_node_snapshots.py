"""What the coordinator knows of snapshots when nodes come and go; without Ray: no holder is
started."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpointing import Snapshot, load_manifest, open_store
from elastic.coordinator.snapshots import Snapshots
from elastic.membership.progress import Progress
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from tests.support.tiny_checkpoint import KEYS, write_state

STEP = 6


def test_a_node_that_is_written_off_and_comes_back_has_its_snapshot(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_state(store, {"w": torch.ones(2)}, step=STEP)
    manifest = load_manifest(store, KEYS, STEP)
    found = Snapshot(manifest=manifest, places=dict.fromkeys(manifest.segments, frozenset({"a"})))
    told = Progress()
    known = Snapshots(
        RunPaths(root=tmp_path),
        told,
        lambda node: Remote(None),
        lambda event: None,
        versions={},
        found=found,
        timeout_s=1.0,
    )
    assert told.snapshot_step == STEP
    known.node_lost("a")
    assert told.snapshot_step == 0
    known.node_joined("b")
    assert told.snapshot_step == 0
    known.node_joined("a")
    assert told.snapshot_step == STEP
