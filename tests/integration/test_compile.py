"""Compiled runs, with the real compiler: near the plain run, equal at any number of replicas, and
equal through faults."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch.distributed as dist

from checkpointing import tensors_sha256
from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from tests.support.tiny import fit, tiny_task, tiny_train, tiny_trainer, write_text
from tests.support.watching import check_replicas_equal, events_of
from trainer.config import OffloadConfig, OptimizerConfig, ParallelConfig
from trainer.float8.config import Float8
from trainer.parallel.compiled import CACHE

LANES, STEPS = 4, 4

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")


@pytest.mark.parametrize(
    "recompute",
    [pytest.param(None, marks=pytest.mark.slow), pytest.param(0.5, marks=pytest.mark.soak)],
)
def test_the_number_of_replicas_does_not_change_a_bit(
    text: Path, tmp_path: Path, recompute: float | None
) -> None:
    """The compiler joins operations, so that fewer results are rounded in between: losses differ
    from the plain run's by some units in the last place, 2**-24 relative each."""
    plain = tiny_train(text, steps=STEPS, lanes=LANES)
    compiled = tiny_train(text, steps=STEPS, lanes=LANES, compile="require", recompute=recompute)
    task = tiny_task(text).prepare(plain, str(tmp_path))
    (expected,) = run_layout(task, plain, replicas=1, lanes=LANES)
    runs = [run_layout(task, compiled, replicas=n, lanes=LANES) for n in (1, 2, 4)]
    workers = [worker for run in runs for worker in run]
    assert len(workers) == 7
    for worker in workers:
        assert isinstance(worker, WorkerResult), worker
        assert (worker.losses, worker.norms) == (workers[0].losses, workers[0].norms)
        np.testing.assert_allclose(worker.losses, expected.losses, rtol=1e-6)
    hashes = {tensors_sha256(sorted(full_parameters([worker]).items())) for worker in workers}
    assert len(hashes) == 1
    assert hashes != {tensors_sha256(sorted(full_parameters([expected]).items()))}


OFFLOAD = OffloadConfig(horizon=1, least_bytes=1)
EIGHT_BITS = Float8(recipe="tensorwise", gather=True)
NARROW = OptimizerConfig(master_dtype="bfloat16", moment_dtype="bfloat16")
BESIDE: dict[str, dict[str, Any]] = {
    "context": {"parallel": ParallelConfig(context=2)},
    "context, recomputed": {"parallel": ParallelConfig(context=2), "recompute": "full"},
    "context, half kept": {"parallel": ParallelConfig(context=2), "recompute": 0.5},
    "context, tensor": {"parallel": ParallelConfig(context=2, tensor=2)},
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "tensor, half kept": {"parallel": ParallelConfig(tensor=2), "recompute": 0.5},
    "tensor, selective": {"parallel": ParallelConfig(tensor=2), "recompute": "selective"},
    "offload": {"offload": OFFLOAD},
    "offload, recomputed": {"offload": OFFLOAD, "recompute": "full"},
    "reshard": {"parallel": ParallelConfig(shard=4, reshard_after_forward=2)},
    "8 bits": {
        "precision": "bfloat16",
        "parallel": ParallelConfig(shard=2),
        "converters": (EIGHT_BITS,),
    },
    "narrow state": {"precision": "bfloat16", "optimizer": NARROW},
}
"""What else compiled blocks may have. Losses in bfloat16 are further from the plain run's."""


@pytest.mark.soak
@pytest.mark.parametrize("texts", ["joined", "apart"])
@pytest.mark.parametrize("changes", BESIDE.values(), ids=BESIDE)
def test_compiled_blocks_go_with_what_else_there_is(
    changes: dict[str, Any], texts: Literal["joined", "apart"], text: Path, tmp_path: Path
) -> None:
    losses = []
    for compile in ("off", "require"):
        train = tiny_train(text, steps=STEPS, lanes=1, compile=compile, **changes)
        train = replace(train, task=replace(train.task, texts=texts))
        task = train.task.prepare(train, str(tmp_path))
        workers = run_layout(task, train, replicas=1, lanes=1)
        assert isinstance(workers[0], WorkerResult), workers[0]
        losses.append(workers[0].losses)
    plain, compiled = losses
    np.testing.assert_allclose(compiled, plain, rtol=5e-3 if "precision" in changes else 1e-6)


@pytest.mark.soak
def test_compiled_blocks_are_gathered_in_two_levels(text: Path, tmp_path: Path) -> None:
    parallel = ParallelConfig(shard=4, workers_per_node=2)
    plain, compiled = (
        tiny_train(text, steps=STEPS, lanes=1, parallel=parallel, compile=compile)
        for compile in ("off", "require")
    )
    task = tiny_task(text).prepare(plain, str(tmp_path))
    expected, found = (run_layout(task, t, replicas=1, lanes=1) for t in (plain, compiled))
    for worker in found:
        assert isinstance(worker, WorkerResult), worker
        np.testing.assert_allclose(worker.losses, expected[0].losses, rtol=1e-6)


@pytest.mark.soak
def test_what_one_worker_has_rehearsed_alone_no_other_compiles(tmp_path: Path) -> None:
    """Two that share the blocks' weights, in processes of their own, each started as that one."""
    write_text(tmp_path / "text")
    cache = tmp_path / "compiled"

    def start(*place: str) -> subprocess.Popen[bytes]:
        run = [sys.executable, "-m", "tests.support.compiled_run", str(tmp_path), *place]
        return subprocess.Popen(run, env={**os.environ, CACHE: str(cache)})

    def kept() -> set[Path]:
        return set((cache / "fxgraph").rglob("*"))

    assert start().wait() == 0
    rehearsed = kept()
    assert rehearsed
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    both = [start(str(rank), str(store.port)) for rank in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    assert kept() == rehearsed


@pytest.mark.soak
def test_faults_do_not_change_a_bit(cluster: None, text: Path, tmp_path: Path) -> None:
    """One worker dies as it compiles, one in a step; nobody else is taken for dead meanwhile."""
    whole = fit(tiny_trainer(text, tmp_path, name="whole", shard=2, compile="require"))
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            name="broken",
            shard=2,
            min_replicas=2,
            compile="require",
            faults="kill@0.compile:1,kill@6:3",
        )
    )
    assert broken.report["faults_fired"] == 2
    lost = events_of(tmp_path / "broken", "worker_lost")
    assert [event["cause"] for event in lost] == ["crash", "crash"]
    check_replicas_equal(broken.report, tmp_path / "broken")
    assert (broken.losses, broken.params) == (whole.losses, whole.params)
    assert broken.samples == whole.samples
