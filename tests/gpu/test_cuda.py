"""The same code on CUDA and NCCL. Needs one GPU: a machine without one skips it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.data_plane import WorkerResult, run_layout
from tests.support.fabric import NCCL
from tests.support.tiny import tiny_train, write_text
from trainer.loop.draws import DrawnError, Draws
from trainer.parallel import wide_sums
from trainer.parallel.wide_sums import add_wide, make_add


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


@pytest.mark.gpu
def test_a_compiled_sum_of_gradients_has_the_bits_of_torch_s() -> None:
    """Also on another thread than the one that has compiled it: backward is on autograd's. There
    nothing is compiled again."""
    device = torch.device("cuda")
    add = make_add("require", device)
    torch._dynamo.utils.counters.clear()
    for count in (wide_sums._LEAST, 3 * wide_sums._LEAST // 2 + 16):
        ours = torch.randn(count, device=device)
        theirs, given = ours.clone(), torch.randn(count, device=device).bfloat16()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(add, [ours], [given]).result()
        add_wide([theirs], [given])
        assert torch.equal(ours, theirs)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
