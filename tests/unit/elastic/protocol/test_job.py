"""What a run's settings mean for its workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from elastic import HealthConfig, ScalingConfig
from elastic.protocol.run_paths import RunPaths
from tests.support.run_plan import run_plan
from trainer.backend.determinism import Determinism


@pytest.mark.parametrize(
    ("replicas", "determinism", "health", "traced"),
    [
        (2, "strict", HealthConfig(), True),
        (2, "strict", HealthConfig(compare_every=None), True),  # by witnesses
        (2, "strict", HealthConfig(witness_every=None), True),  # where it is done again
        (2, "strict", HealthConfig(compare_every=None, witness_every=None), False),
        (2, "fast", HealthConfig(), False),
        (1, "strict", HealthConfig(), False),
    ],
)
def test_gradients_leave_digests_where_somebody_may_read_them(
    tmp_path: Path, replicas: int, determinism: Determinism, health: HealthConfig, traced: bool
) -> None:
    job = run_plan(RunPaths(root=tmp_path), cast(Any, None)).job
    job = dataclasses.replace(
        job,
        train=dataclasses.replace(job.train, determinism=determinism),
        scaling=ScalingConfig(max_replicas=replicas),
        health=health,
    )
    assert job.traces_gradients is traced
