"""The same code on CUDA and NCCL. Needs one GPU: a machine without one skips it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.data_plane import WorkerResult, run_layout
from tests.support.fabric import NCCL
from tests.support.tiny import tiny_train, write_text


@pytest.mark.gpu
def test_one_gpu_computes_what_the_cpu_computes(tmp_path: Path) -> None:
    """Float32 on both; cuBLAS adds in another order, so losses agree to about 1e-4."""
    train = tiny_train(write_text(tmp_path / "text"), steps=4)
    task = train.task.prepare(train, str(tmp_path / "cache"))
    (cpu,) = run_layout(task, train, replicas=1, lanes=2)
    (gpu,) = run_layout(task, train, replicas=1, lanes=2, fabric=NCCL)
    assert isinstance(gpu, WorkerResult), gpu
    np.testing.assert_allclose(gpu.losses, cpu.losses, rtol=1e-4)
