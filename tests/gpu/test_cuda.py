"""The same code on CUDA and NCCL. Needs one GPU: a machine without one skips it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.data_plane import WorkerResult, run_layout
from tests.support.fabric import NCCL
from tests.support.tiny import tiny_train, write_text
from trainer.loop.draws import DrawnError, Draws


@pytest.mark.gpu
def test_one_gpu_computes_what_the_cpu_computes(tmp_path: Path) -> None:
    """Float32 on both; cuBLAS adds in another order, so losses agree to about 1e-4."""
    train = tiny_train(write_text(tmp_path / "text"), steps=4)
    task = train.task.prepare(train, str(tmp_path / "cache"))
    (cpu,) = run_layout(task, train, replicas=1, lanes=2)
    (gpu,) = run_layout(task, train, replicas=1, lanes=2, fabric=NCCL)
    assert isinstance(gpu, WorkerResult), gpu
    np.testing.assert_allclose(gpu.losses, cpu.losses, rtol=1e-4)


@pytest.mark.gpu
def test_who_reads_ahead_does_not_seed_the_gpu_nor_put_its_generator_back() -> None:
    torch.manual_seed(3)
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state()
    for refused in (
        lambda: torch.manual_seed(4),
        lambda: torch.cuda.manual_seed(4),
        lambda: torch.random.fork_rng().__enter__(),
    ):
        with pytest.raises(DrawnError), Draws(refused=True):
            refused()
    assert torch.equal(torch.cuda.get_rng_state(), before)
