"""The peak that a dry run foretells is that of the allocator in real steps."""

from __future__ import annotations

import pytest

from tests.support.measured_peak import measured_peak
from tests.support.small_llama import small_train
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.dryrun.rank import dry_run

LAYOUTS = {
    "one worker": (small_train(), 1),
    "tied, chunked head": (small_train(tied=True, loss_chunk=64), 1),
    "recomputed": (small_train(recompute="full", lanes=4, global_batch=16), 1),
    "bfloat16, selective": (small_train(precision="bfloat16", recompute="selective"), 1),
    "shard 2, two replicas": (
        small_train(shard=2, lanes=4, global_batch=32, micro_batch=1),
        2,
    ),
    "tensor 2": (small_train(tensor=2), 1),
    "context 2": (small_train(parallel=ParallelConfig(context=2)), 1),
    "one lane, two replicas": (small_train(lanes=2, bucket_bytes=2**20), 2),
    "bfloat16 sums": (small_train(lanes=2, bucket_bytes=2**20, reduce_dtype="bfloat16"), 2),
    "bfloat16 moments": (
        small_train(optimizer=OptimizerConfig(moment_dtype="bfloat16"), recompute="full"),
        1,
    ),
    "bfloat16 masters, gathered ahead": (
        small_train(
            shard=2,
            global_batch=8,
            micro_batch=1,
            precision="bfloat16",
            gather_ahead=3,
            optimizer=OptimizerConfig(master_dtype="bfloat16", moment_dtype="bfloat16"),
        ),
        1,
    ),
}
TELLING = ("tensor 2", "context 2", "bfloat16 masters, gathered ahead")
"""They have most of what the others have."""


@pytest.mark.parametrize(
    ("train", "replicas"),
    [
        pytest.param(*each, marks=pytest.mark.slow if name in TELLING else pytest.mark.soak)
        for name, each in LAYOUTS.items()
    ],
    ids=LAYOUTS,
)
def test_the_peak_is_the_allocators(train: TrainConfig, replicas: int) -> None:
    foretold = dry_run(train, replicas=replicas, device="cpu").peak_bytes
    measured = measured_peak(train, replicas=replicas)
    assert foretold == pytest.approx(measured, rel=0.1)


def test_the_peak_of_one_worker_is_the_allocators() -> None:
    train = small_train(recompute="full")
    foretold = dry_run(train, replicas=1, device="cpu").peak_bytes
    assert foretold == pytest.approx(measured_peak(train, replicas=1), rel=0.1)
