"""When one worker of a replica dies the others keep their ranks and their state, and only the one
in its place receives any."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from checkpointing import Keys, newest, open_store
from tests.support.paced import paced_task
from tests.support.tiny import Outcome, fit, tiny_task, tiny_train, tiny_trainer
from tests.support.watching import events_of
from trainer.config import ParallelConfig

STEPS, KILLED_AT = 40, 6
SOAK = pytest.mark.soak

LAYOUTS = {
    "2x1": ParallelConfig(shard=2),
    "1x2": ParallelConfig(tensor=2),
    "3x1": ParallelConfig(shard=3),
    "4x1": ParallelConfig(shard=4),
    "2x2": ParallelConfig(shard=2, tensor=2),
    "4x1 in two levels": ParallelConfig(shard=4, workers_per_node=2),
}

_whole: dict[str, Outcome] = {}


def run(text: Path, storage: Path, layout: str, **changes: Any) -> Outcome:
    """A run of two replicas, which is slow while one is not back."""
    task = paced_task(tiny_task(text), storage, "run", 2, patience_s=0.25)
    train = tiny_train(
        text,
        task=task,
        steps=STEPS,
        parallel=LAYOUTS[layout],
        global_batch=24,
        prefetch=0,  # samples pace the steps
    )
    return fit(tiny_trainer(text, storage, train=train, **changes))


@pytest.mark.parametrize(
    ("layout", "killed", "spares"),
    [
        pytest.param("2x1", 0, 1),
        pytest.param("2x1", 1, 0, marks=SOAK),
        pytest.param("1x2", 0, 1, marks=SOAK),
        pytest.param("3x1", 0, 1, marks=SOAK),  # in parts of different length
        pytest.param("4x1", 2, 1, marks=SOAK),
        pytest.param("2x2", 0, 1, marks=SOAK),
        pytest.param("4x1 in two levels", 1, 1, marks=SOAK),
    ],
)
def test_only_the_one_in_a_lost_workers_place_is_healed(
    cluster: None, text: Path, tmp_path: Path, layout: str, killed: int, spares: int
) -> None:
    workers = LAYOUTS[layout].workers
    broken = run(
        text, tmp_path / "broken", layout,
        spares=spares, faults=f"kill@{KILLED_AT}:{workers + killed}",
    )  # fmt: skip
    root = tmp_path / "broken" / "run"
    formed = [e["workers"] for e in events_of(root, "replica_forming") if e["replica"] == 1]
    assert len(formed) == 2
    differ = [rank for rank in range(workers) if formed[0][rank] != formed[1][rank]]
    assert differ == [killed], "its peers have the ranks that they had"
    lost = [event["worker"] for event in events_of(root, "worker_lost")]
    assert lost == [formed[0][killed]]
    (healed,) = events_of(root, "replica_healed")
    assert healed["bytes"] <= 1.05 * state_bytes(root) / workers
    if layout not in _whole:
        _whole[layout] = run(text, tmp_path / "whole", layout)
    whole = _whole[layout]
    assert broken.report["lost_steps"] == 0 and broken.report["replicas_equal"] is True
    assert (broken.samples, broken.losses, broken.params) == (
        whole.samples,
        whole.losses,
        whole.params,
    )


def state_bytes(root: Path) -> int:
    """Of one whole copy, by its last checkpoint."""
    manifest = newest(open_store(root / "checkpoints"), Keys())
    assert manifest is not None
    return sum(4 * math.prod(info.shape) for info in manifest.tensors.values())
