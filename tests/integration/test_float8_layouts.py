"""8-bit products and Transformer Engine's place beside what the matrix has not
(test_matrix.py): compilation, and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from tests.support.te_stand_in import STAND_INS, OnCpu
from tests.support.tiny import tiny_task, tiny_train
from trainer.float8.config import Float8

LANES = 4
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Layers whose parts over two tensor ranks still have sides that 16 divides."""

PLAIN: dict[str, Any] = {}
GATHERED: dict[str, Any] = {"converters": (Float8(gather=True),)}
LIBRARY: dict[str, Any] = {"converters": (OnCpu(),), "precision": "bfloat16"}
"""By what stands in for Transformer Engine."""


def run(
    text: Path, cache: Path, replicas: int = 1, shard: int = 1, tensor: int = 1, **changes: Any
) -> list[WorkerResult]:
    """A step of each worker."""
    settings = {"steps": 1, "lanes": LANES, "micro_batch": 1, **changes}
    train = tiny_train(text, shard=shard, tensor=tensor, **settings)
    task = tiny_task(text, **WIDE).prepare(train, str(cache))
    results = run_layout(task, train, replicas=replicas, lanes=LANES)
    assert all(isinstance(worker, WorkerResult) for worker in results), results
    return results


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_compiled_blocks_are_the_same_with_a_second_replica(text: Path, tmp_path: Path) -> None:
    alone, one, other = (
        full_parameters([worker])
        for replicas in (1, 2)
        for worker in run(text, tmp_path, replicas, compile="require", **GATHERED)
    )
    for name, weights in alone.items():
        assert weights.equal(one[name]) and weights.equal(other[name]), name


@pytest.mark.slow
def test_a_checkpoint_of_the_library_is_the_plain_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tensors, with the same boxes on each worker: names, shapes and placements."""
    monkeypatch.syspath_prepend(STAND_INS)  # workers get the path, too
    boxes = [
        [
            {name: value[:2] for name, value in worker.local.items()}
            for worker in run(text, tmp_path, shard=2, tensor=2, **how)
        ]
        for how in (PLAIN, LIBRARY, GATHERED)
    ]
    assert boxes[0] == boxes[1] == boxes[2]
