"""What has streams or collectives of its own, on a device: activations that wait on the host, the
ring over the tokens of a sample, tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from tests.support.fabric import GLOO, NCCL, Fabric, on
from tests.support.tiny import tiny_train, write_text
from trainer.config import OffloadConfig, ParallelConfig

STEPS, LANES = 3, 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


def trained(text: Path, fabric: Fabric, **changes: Any) -> list[WorkerResult]:
    """The workers of one replica after some steps."""
    train = tiny_train(text, **{"steps": STEPS, **changes})
    task = train.task.prepare(train, str(text.parent / "cache"))
    return run_layout(task, train, replicas=1, lanes=LANES, fabric=fabric)


@pytest.mark.parametrize("recompute", [None, "full"])
@on(GLOO, NCCL)
def test_activations_that_wait_on_the_host_change_no_bit(
    text: Path, fabric: Fabric, recompute: Any
) -> None:
    offload = OffloadConfig(horizon=1, least_bytes=1)
    (here,) = trained(text, fabric, recompute=recompute)
    (there,) = trained(text, fabric, recompute=recompute, offload=offload)
    assert (here.losses, here.norms) == (there.losses, there.norms)
    for name, (_, _, weights) in here.local.items():
        assert torch.equal(weights, there.local[name][2]), name


@pytest.mark.parametrize("degree", ["context", "tensor"])
@on(GLOO, NCCL)
def test_two_workers_that_divide_a_sample_or_a_layer_compute_what_one_does(
    text: Path, fabric: Fabric, degree: str
) -> None:
    """But for rounding."""
    (one,) = trained(text, fabric)
    degrees: dict[str, Any] = {degree: 2}
    two = trained(text, fabric, parallel=ParallelConfig(**degrees))
    np.testing.assert_allclose(two[0].losses, one.losses, rtol=1e-4)
    expected = full_parameters([one])
    for name, weights in full_parameters(two).items():
        torch.testing.assert_close(weights, expected[name], rtol=1e-3, atol=1e-4)
