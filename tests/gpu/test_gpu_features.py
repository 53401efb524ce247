"""What has streams, kernels or collectives of its own, on a device: activations that wait on the
host, workers that share a sample, a layer or the gathering, 8-bit products, compiled blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.data_plane import Run, WorkerResult, full_gradients, run_in_turn, run_layout
from tests.support.fabric import GLOO, NCCL, Fabric, on
from tests.support.tiny import tiny_train, write_text
from trainer.config import OffloadConfig, ParallelConfig
from trainer.float8.config import Float8

STEPS, LANES = 3, 2

BESIDE_ONE: dict[str, tuple[dict[str, Any], float]] = {
    "context": ({"parallel": ParallelConfig(shard=2, context=2), "precision": "bfloat16"}, 0.02),
    "tensor": ({"parallel": ParallelConfig(tensor=2)}, 1e-5),
    "two levels": ({"parallel": ParallelConfig(shard=4, workers_per_node=2)}, 1e-5),
    "8 bits": ({"converters": (Float8(),), "precision": "bfloat16"}, 0.15),
}
"""Settings, and the most that a gradient may be off one worker's in float32, as the norm of the
difference over the norm (docs/precision.md)."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


def run_of(text: Path, **changes: Any) -> Run:
    """One replica's."""
    train = tiny_train(text, **{"steps": 1, **changes})
    task = train.task.prepare(train, str(text.parent / "cache"))
    return Run(task=task, train=train, replicas=1, lanes=LANES)


def trained(text: Path, fabric: Fabric, **changes: Any) -> list[WorkerResult]:
    """The workers of one replica."""
    run = run_of(text, **changes)
    return run_layout(run.task, run.train, replicas=1, lanes=LANES, fabric=fabric)


def check_gradients(
    workers: list[WorkerResult], alone: list[WorkerResult], *, bound: float
) -> None:
    """Tensor by tensor."""
    expected = full_gradients(alone)
    for name, gradient in full_gradients(workers).items():
        off = torch.linalg.vector_norm(gradient - expected[name])
        assert off <= bound * torch.linalg.vector_norm(expected[name]), name


@pytest.mark.parametrize("recompute", [None, "full"])
@on(GLOO, NCCL)
def test_activations_that_wait_on_the_host_change_no_bit(
    text: Path, fabric: Fabric, recompute: Any
) -> None:
    offload = OffloadConfig(horizon=1, least_bytes=1)
    (here,) = trained(text, fabric, steps=STEPS, recompute=recompute)
    (there,) = trained(text, fabric, steps=STEPS, recompute=recompute, offload=offload)
    assert (here.losses, here.norms) == (there.losses, there.norms)
    for name, (_, _, weights) in here.local.items():
        assert torch.equal(weights, there.local[name][2]), name


@pytest.mark.parametrize("feature", BESIDE_ONE)
@on(GLOO, NCCL)
def test_what_is_computed_otherwise_has_the_gradient_of_one_worker(
    text: Path, fabric: Fabric, feature: str
) -> None:
    """But for rounding."""
    changes, bound = BESIDE_ONE[feature]
    workers, alone = run_in_turn([run_of(text, **changes), run_of(text)], fabric=fabric)
    check_gradients(workers, alone, bound=bound)


@on(NCCL)
def test_compiled_blocks_compute_what_the_others_do(text: Path, fabric: Fabric) -> None:
    """On a CPU it is slow: see test_compile.py."""
    compiled = trained(text, fabric, compile="require")
    check_gradients(compiled, trained(text, fabric), bound=1e-5)
