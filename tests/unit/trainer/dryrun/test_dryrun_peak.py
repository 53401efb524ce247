"""The peak that a dry run foretells is that of the allocator in real steps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastic import Float8, ModelConfig
from tests.support.measured_peak import measured_peak
from tests.support.small_llama import SETTINGS, small_train
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.dryrun.rank import dry_run
from trainer.tasks.custom import CustomTask


def of_text(architecture: str, settings: dict[str, Any], **changes: Any) -> TrainConfig:
    """Another model in the place of the Llama."""
    train = small_train(**changes)
    model = ModelConfig(architecture=architecture, settings=settings)
    return replace(train, task=replace(train.task, model=model))


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Of 32 x 32 points, with what they show."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1, 32, 32), sample / 256), torch.tensor(sample % 10)


def make_network() -> nn.Module:
    """Two wide layers, and no blocks. No convolution: what oneDNN takes for one is not foretold."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(1024, 2048),
        nn.LayerNorm(2048),
        nn.GELU(),
        nn.Linear(2048, 512),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(512, 10),
    )


def entropy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """The loss of some pictures."""
    pictures, what = batch
    return nn.functional.cross_entropy(model(pictures), what, reduction="sum"), len(what)


PICTURES = CustomTask(build_model=make_network, loss_function=entropy, dataset=Pictures())
GPT2 = {
    **{"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 4096, "n_positions": 512},
    **{"bos_token_id": None, "eos_token_id": None},
}
APART = small_train(task=replace(small_train().task, texts="apart"))
EXPERTS = {**SETTINGS, "num_local_experts": 4, "num_experts_per_tok": 2}

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
    "texts apart": (APART, 1),
    "one lane, two replicas": (small_train(lanes=2, bucket_bytes=2**20), 2),
    "three lanes each, of which those of the second replica need more": (
        small_train(lanes=6, global_batch=12, bucket_bytes=2**20),
        2,
    ),
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
    "8 bits": (small_train(precision="bfloat16", converters=(Float8(),)), 1),
    "8 bits by rows, recomputed": (
        small_train(precision="bfloat16", recompute="full", converters=(Float8(recipe="rowwise"),)),
        1,
    ),
    "GPT-2": (of_text("gpt2", GPT2), 1),
    "a mixture of experts": (of_text("mixtral", EXPERTS, precision="bfloat16"), 1),
    "compiled": (small_train(compile="require", global_batch=16), 1),
    "compiled, every 2nd recomputed": (
        small_train(compile="require", recompute=2, global_batch=16),
        1,
    ),
    "compiled, half kept": (small_train(compile="require", recompute=0.5, global_batch=16), 1),
    "compiled, tied, chunked head": (small_train(compile="require", tied=True, loss_chunk=64), 1),
    "compiled, bfloat16, selective": (
        small_train(
            compile="require", precision="bfloat16", recompute="selective", global_batch=16
        ),
        1,
    ),
    "compiled, shard 2, two replicas": (
        small_train(
            compile="require",
            precision="bfloat16",
            shard=2,
            lanes=4,
            global_batch=32,
            micro_batch=4,
        ),
        2,
    ),
    "compiled, tensor 2": (small_train(compile="require", tensor=2, global_batch=16), 1),
    "compiled, tensor 2, half kept": (
        small_train(compile="require", tensor=2, recompute=0.5, global_batch=16),
        1,
    ),
    "compiled, context 2": (
        small_train(compile="require", parallel=ParallelConfig(context=2), global_batch=16),
        1,
    ),
    "compiled, texts apart": (replace(APART, compile="require", global_batch=16), 1),
    "compiled, GPT-2": (of_text("gpt2", GPT2, compile="require", global_batch=16), 1),
    "compiled, a mixture of experts": (
        of_text("mixtral", EXPERTS, precision="bfloat16", compile="on"),
        1,
    ),
    "a task of one's own": (TrainConfig(task=PICTURES, steps=10, global_batch=256, lanes=1), 1),
}
TELLING = (
    *("tensor 2", "context 2", "bfloat16 masters, gathered ahead"),
    *("GPT-2", "a mixture of experts", "a task of one's own"),
    "compiled, context 2",
)
"""Layouts that have most of what the others have, and other models than the Llama."""


@pytest.mark.parametrize(
    ("train", "replicas"),
    [
        pytest.param(*each, marks=pytest.mark.slow if name in TELLING else pytest.mark.soak)
        for name, each in LAYOUTS.items()
    ],
    ids=LAYOUTS,
)
def test_the_peak_is_the_allocators(train: TrainConfig, replicas: int) -> None:
    if train.compile != "off" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ on a CPU")
    foretold = dry_run(train, replicas=replicas, device="cpu").peak_bytes
    measured = measured_peak(train, replicas=replicas)
    assert foretold == pytest.approx(measured, rel=0.1)


def test_the_peak_of_one_worker_is_the_allocators() -> None:
    train = small_train(recompute="full")
    foretold = dry_run(train, replicas=1, device="cpu").peak_bytes
    assert foretold == pytest.approx(measured_peak(train, replicas=1), rel=0.1)


def sum_of_squares(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A loss without a target."""
    return model(batch).square().sum(), len(batch)


def test_the_peak_of_a_larger_evaluation_is_the_allocators() -> None:
    """Samples that are held out are 256 times as large."""
    task = CustomTask(
        build_model=partial(nn.Linear, 32, 1024),
        loss_function=sum_of_squares,
        dataset=torch.ones(32, 32),
        eval_dataset=torch.ones(40, 256, 32),
    )
    train = TrainConfig(task=task, steps=2, global_batch=16, lanes=1)
    foretold = dry_run(train, replicas=1, device="cpu")
    measured = measured_peak(train, replicas=1, evaluates=True)
    assert foretold.evaluation_bytes == pytest.approx(measured, rel=0.1)
    assert foretold.peak_bytes < 0.5 * measured


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_the_peak_of_an_evaluation_whose_step_is_compiled_is_the_allocators() -> None:
    """The loss is not compiled there, and writes logits in float32 and their softmax."""
    train = small_train(
        compile="require",
        precision="bfloat16",
        recompute="full",
        tied=True,
        global_batch=16,
        eval_samples=24,
    )
    foretold = dry_run(train, replicas=1, device="cpu")
    measured = measured_peak(train, replicas=1, evaluates=True)
    assert foretold.evaluation_bytes == pytest.approx(measured, rel=0.1)
    assert foretold.peak_bytes < 0.8 * measured
