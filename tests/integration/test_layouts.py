"""Every layout computes what one process computes, and any number of replicas computes the same
bits."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checkpointing import tensors_sha256
from tests.support.data_plane import Run, WorkerResult, full_parameters, run_in_turn, run_layout
from tests.support.gradients import fill_whole
from tests.support.tiny import SEQ_LEN, tiny_task, tiny_train
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.data import sample_ids
from trainer.errors import NonFiniteError
from trainer.tasks.causal_lm import PreparedCausalLM
from trainer.tasks.custom import CustomTask

LANES, STEPS = 4, 4


@pytest.fixture(scope="module")
def lab(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(text, str(tmp_path_factory.mktemp("cache")))


class Lab:
    """The run under test in its layouts, and what a plain loop makes of it; each made once."""

    def __init__(self, text: Path, cache: str) -> None:
        self.text, self.cache = text, cache
        self.task = functools.cache(self._task)
        self.reference = functools.cache(self._reference)

    def train(self, shard: int = 1, tensor: int = 1, **changes: Any) -> TrainConfig:
        settings = {"steps": STEPS, "lanes": LANES, "micro_batch": 1, **changes}
        return tiny_train(self.text, shard=shard, tensor=tensor, **settings)

    def _task(self, tied: bool) -> PreparedCausalLM:
        task = tiny_task(self.text, tie_word_embeddings=tied)
        return task.prepare(self.train(), self.cache)

    def _reference(self, tied: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        return single_process(self.task(tied), self.train())


def single_process(
    task: PreparedCausalLM, train: TrainConfig
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The whole run in plain PyTorch: no FSDP, no lanes, no replicas; one batch, one backward a
    step."""
    model = fill_whole(task, train)
    o = train.optimizer
    assert isinstance(o, OptimizerConfig)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": o.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    data: Any = task.train_data()
    losses = []
    for step in range(train.steps):
        ids = sample_ids(train.seed, step * train.global_batch, train.global_batch, len(data))
        batch = data.batch(ids)
        logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        rise, rest = (
            (step + 1) / o.warmup_steps,
            (step - o.warmup_steps) / (train.steps - 1 - o.warmup_steps),
        )
        cosine = o.min_lr_ratio + (1 - o.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * rest))
        for group in optimizer.param_groups:
            group["lr"] = o.lr * (rise if step < o.warmup_steps else cosine)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("replicas", "shard", "tensor", "tied"),
    [(2, 2, 2, False), (1, 1, 2, True)],
)
def test_layout_agrees_with_a_plain_loop(
    lab: Lab, replicas: int, shard: int, tensor: int, tied: bool
) -> None:
    """Over several steps; gradients of one step, in more layouts, are test_matrix.py's.
    Float32 sums in another order differ by a few units in the last place of each partial sum
    (2**-24 relative, over a few hundred terms: about 1e-5); AdamW's division by the root of a small
    second moment widens that on weights."""
    task, train = lab.task(tied), lab.train(shard, tensor)
    results = run_layout(task, train, replicas=replicas, lanes=LANES)
    losses, parameters = lab.reference(tied)
    for worker in results:
        assert isinstance(worker, WorkerResult), worker
        np.testing.assert_allclose(worker.losses, losses, rtol=2e-5)
    got = full_parameters(results[: shard * tensor])
    assert got.keys() == parameters.keys()
    for name, value in parameters.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-4, msg=message)


@pytest.mark.slow
def test_two_levels_agree_with_a_plain_loop_at_any_number_of_replicas(lab: Lab) -> None:
    """Two nodes with two workers; the sums are in an order of their own."""
    train = lab.train(parallel=ParallelConfig(shard=4, workers_per_node=2), global_batch=16)
    losses, parameters = single_process(lab.task(False), train)
    one, two = (run_layout(lab.task(False), train, replicas=n, lanes=LANES) for n in (1, 2))
    for worker in (*one, *two):
        assert isinstance(worker, WorkerResult), worker
        np.testing.assert_allclose(worker.losses, losses, rtol=2e-5)
        assert (worker.losses, worker.norms) == (one[0].losses, one[0].norms)
    for replica in (one, two[:4], two[4:]):
        got = full_parameters(replica)
        for name, value in parameters.items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-4)
            assert torch.equal(got[name], full_parameters(one)[name])


def test_the_number_of_replicas_does_not_change_a_bit(lab: Lab) -> None:
    runs = {
        n: run_layout(lab.task(False), lab.train(), replicas=n, lanes=LANES) for n in (1, 2, 3, 4)
    }
    every_worker = [worker for workers in runs.values() for worker in workers]
    assert len(every_worker) == 10
    for worker in every_worker:
        assert worker.losses == runs[1][0].losses
        assert worker.norms == runs[1][0].norms
        assert worker.digests == runs[1][0].digests
    hashes = {tensors_sha256(sorted(full_parameters([worker]).items())) for worker in every_worker}
    assert len(hashes) == 1


def test_a_sum_in_bfloat16_is_the_same_at_any_number_of_replicas(lab: Lab) -> None:
    """Rounded wherever a lane lies; and it is another sum than that in float32."""

    def weights(replicas: int, **changes: Any) -> str:
        train = lab.train(bucket_bytes=SMALL_BUCKETS, **changes)
        results = run_layout(lab.task(False), train, replicas=replicas, lanes=LANES)
        return tensors_sha256(sorted(full_parameters(results[:1]).items()))

    alone = weights(1, reduce_dtype="bfloat16")
    assert weights(2, reduce_dtype="bfloat16") == alone
    assert weights(4, reduce_dtype="bfloat16") == alone
    assert weights(1) != alone


SMALL_BUCKETS = 12_000
"""Bytes: a layer of the tiny model is 37 kB, a quarter of one at shard x tensor 2x2 is 9 kB."""


def test_the_auxiliary_loss_of_a_router_is_the_same_at_any_number_of_replicas(
    lab: Lab,
) -> None:
    """It is no sum over tokens, but it is one micro-batch's own."""

    def first_and_last(replicas: int, coefficient: float) -> tuple[list[float], str]:
        settings = {"num_local_experts": 4, "router_aux_loss_coef": coefficient}
        tiny = tiny_task(lab.text, **settings)
        moe = replace(tiny, model=replace(tiny.model, architecture="mixtral"))
        task = moe.prepare(lab.train(), lab.cache)
        results = run_layout(task, lab.train(), replicas=replicas, lanes=LANES)
        return results[0].losses, tensors_sha256(sorted(full_parameters(results[:1]).items()))

    alone = first_and_last(1, 0.1)
    assert first_and_last(2, 0.1) == alone
    assert first_and_last(2, 0.0) != alone


def check_buckets_change_no_bit(lab: Lab, shard: int, tensor: int, replicas: list[int]) -> None:
    """One bucket at one replica against many buckets at others, place by place."""
    task, train = lab.task(False), lab.train(shard, tensor)
    small = replace(train, bucket_bytes=SMALL_BUCKETS)
    whole = run_layout(task, train, replicas=1, lanes=LANES)
    assert [worker.buckets for worker in whole] == [1] * shard * tensor
    for n in replicas:
        cut = run_layout(task, small, replicas=n, lanes=LANES)
        assert len(cut) == n * shard * tensor
        for index, worker in enumerate(cut):
            same = whole[index % (shard * tensor)]
            assert worker.buckets > 3
            assert (worker.losses, worker.norms) == (same.losses, same.norms)
            for name, (_, _, value) in worker.local.items():
                assert torch.equal(value, same.local[name][2]), name


def test_buckets_do_not_change_a_bit(lab: Lab) -> None:
    """Up to a fifth replica, for which there is no lane."""
    check_buckets_change_no_bit(lab, 1, 1, [3, 5])


def test_buckets_do_not_change_a_bit_with_shards_and_tensor_ranks(lab: Lab) -> None:
    check_buckets_change_no_bit(lab, 2, 2, [2])


@pytest.mark.soak
@pytest.mark.parametrize(("shard", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_buckets_do_not_change_a_bit_in_any_layout(lab: Lab, shard: int, tensor: int) -> None:
    check_buckets_change_no_bit(lab, shard, tensor, [1, 2, 3])


@pytest.mark.parametrize(("shard", "tensor"), [(2, 1), (1, 2), (2, 2)])
def test_workers_may_change_places(lab: Lab, shard: int, tensor: int) -> None:
    """A survivor of a broken replica gets another slot in the same process, and must not remember
    the old one."""
    task, train = lab.task(False), lab.train(shard, tensor)
    places = list(range(shard * tensor))
    orders = [places, places[::-1], places[1:] + places[:1]]
    run = Run(task=task, train=train, replicas=1, lanes=LANES)
    first, *others = run_in_turn([run] * len(orders), orders=orders)
    for other in others:
        assert [worker.losses for worker in other] == [worker.losses for worker in first]
        assert [worker.norms for worker in other] == [worker.norms for worker in first]


def test_evaluation_covers_every_sample_once_in_every_layout(lab: Lab) -> None:
    results = [
        run_layout(lab.task(False), lab.train(shard, eval_samples=37), replicas=1, lanes=LANES)[0]
        for shard in (1, 2)
    ]
    (step, loss, tokens), (_, other_loss, other_tokens) = (r.evaluations[-1] for r in results)
    assert step == STEPS
    assert tokens == other_tokens == min(37, len(lab.task(False).eval_data() or [])) * SEQ_LEN
    assert loss == pytest.approx(other_loss, rel=2e-5)


class Fragile(nn.Module):
    """Overflows on sample 3."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == 3, torch.exp(x * 1e4), self.linear(x))


def fragile_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), batch.numel()


def test_a_non_finite_step_never_reaches_the_weights() -> None:
    task = CustomTask(
        build_model=Fragile,
        loss_function=fragile_loss,
        dataset=[torch.tensor([float(i)]) for i in range(8)],
    )
    config = TrainConfig(
        task=task, steps=6, global_batch=2, lanes=2, optimizer=OptimizerConfig(lr=0.1)
    )
    (worker,) = run_layout(task, config, replicas=1, lanes=2)
    ids = [sample_ids(0, step * 2, 2, 8) for step in range(6)]
    assert [not math.isfinite(loss) for loss in worker.losses] == [3 in step for step in ids]
    assert any(3 in step for step in ids)
    assert all(torch.isfinite(value).all() for _, _, value in worker.local.values())


def test_too_many_non_finite_steps_in_a_row_end_the_run_naming_step_and_samples() -> None:
    task = CustomTask(
        build_model=Fragile, loss_function=fragile_loss, dataset=[torch.tensor([3.0])] * 4
    )
    config = TrainConfig(task=task, steps=6, global_batch=2, lanes=2)
    (error,) = run_layout(task, config, replicas=1, lanes=2)
    assert isinstance(error, NonFiniteError)
    assert (error.step, error.count, len(error.samples)) == (1, 2, 2)
