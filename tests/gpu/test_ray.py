"""A run on Ray, of two workers at half a GPU each: one is killed, and no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fabric import GLOO, NCCL, Fabric, on
from tests.support.shared_gpus import OnSharedGpus
from tests.support.tiny import fit, tiny_train, tiny_trainer, write_text

pytest.importorskip("ray", reason="needs Ray; a machine without it takes a kit of packages along")


@on(GLOO, NCCL)
def test_two_workers_share_a_gpu_and_one_is_killed(
    cluster: None, fabric: Fabric, tmp_path: Path
) -> None:
    text = write_text(tmp_path / "text")
    outcomes = [
        fit(
            tiny_trainer(
                text,
                tmp_path,
                name=name,
                train=tiny_train(text, steps=6, task=OnSharedGpus(text)),
                faults=faults,
                device=fabric.device,
                gpus_per_worker=0.5,
            )
        )
        for name, faults in (("undisturbed", "none"), ("killed", "kill@3.reduce:1"))
    ]
    alone, killed = outcomes
    assert killed.report["faults_fired"] == 1
    assert killed.report["replicas_equal"] is not False
    assert (killed.params, killed.samples, killed.losses) == (
        alone.params,
        alone.samples,
        alone.losses,
    )
