"""When one worker of a replica dies the others keep their ranks and their state, and only the one
in its place receives any."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from checkpointing import Keys, newest, open_store
from tests.support.paced import paced_task
from tests.support.tiny import Outcome, fit, tiny_train, tiny_trainer
from tests.support.watching import events_of

STEPS, KILLED_AT = 40, 6
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak

_whole: dict[tuple[int, int], Outcome] = {}


def run(text: Path, storage: Path, shard: int, tensor: int, **changes: Any) -> Outcome:
    """A run of two replicas, which is slow while one is not back."""
    task = paced_task(text, storage, "run", 2, patience_s=0.25)
    train = tiny_train(
        text,
        task=task,
        steps=STEPS,
        shard=shard,
        tensor=tensor,
        global_batch=24,
        prefetch=0,  # samples pace the steps
    )
    return fit(tiny_trainer(text, storage, train=train, **changes))


@pytest.mark.parametrize(
    ("shard", "tensor", "killed", "spares"),
    [
        pytest.param(2, 1, 0, 1, id="2x1"),
        pytest.param(2, 1, 1, 0, id="2x1 without a spare", marks=SOAK),
        pytest.param(1, 2, 0, 1, id="1x2", marks=SOAK),
        pytest.param(3, 1, 0, 1, id="3x1, in parts of different length", marks=SLOW),
        pytest.param(4, 1, 2, 1, id="4x1", marks=SOAK),
        pytest.param(2, 2, 0, 1, id="2x2", marks=SOAK),
    ],
)
def test_only_the_one_in_a_lost_workers_place_is_healed(
    cluster: None, text: Path, tmp_path: Path, shard: int, tensor: int, killed: int, spares: int
) -> None:
    workers = shard * tensor
    broken = run(
        text, tmp_path / "broken", shard, tensor,
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
    if (shard, tensor) not in _whole:
        _whole[shard, tensor] = run(text, tmp_path / "whole", shard, tensor)
    whole = _whole[shard, tensor]
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
