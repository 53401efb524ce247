"""All replicas write a save together: every byte once, in equal parts, and it reads back as what
they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointing import Box, Reader, open_store
from tests.support.data_plane import commit_save, full_parameters, run_layout
from tests.support.tiny import tiny_task, tiny_train


@pytest.mark.parametrize(
    ("replicas", "shard", "tensor"),
    [(2, 2, 1), pytest.param(3, 1, 2, marks=pytest.mark.slow)],
)
def test_a_save_of_all_replicas(
    text: Path, tmp_path: Path, replicas: int, shard: int, tensor: int
) -> None:
    train = tiny_train(text, shard=shard, tensor=tensor, steps=2, lanes=replicas, global_batch=12)
    task = tiny_task(text).prepare(train, str(tmp_path / "cache"))
    workers = run_layout(task, train, replicas=replicas, lanes=replicas, saves=True)
    store = open_store(tmp_path / "store")
    manifest = commit_save(workers, store, 2)
    receipts = [worker.saved[0] for worker in workers]
    assert sorted(r.rank for r in receipts) == list(range(replicas * shard * tensor))
    reader = Reader(store, manifest)
    full = full_parameters(workers[: shard * tensor])
    boxes = [Box(f"param/{n}", (0,) * t.dim(), tuple(t.shape)) for n, t in full.items()]
    for value, expected in zip(reader.read_many(boxes), full.values(), strict=True):
        assert torch.equal(value, expected)
    written = [sum(s.end - s.begin for s in receipt.slices) for receipt in receipts]
    columns = [written[i :: shard * tensor] for i in range(shard * tensor)]
    row = max(t.nbytes // t.shape[0] for t in full.values())
    assert all(max(column) - min(column) <= 2 * row for column in columns)
