"""Workers that share the tokens of each sample, and those that share parameters in any strategy,
compute what one process computes; and any number of replicas the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.data_plane import WorkerResult, run_layout
from tests.support.gradients import Case, Found, gradients_of, plain_gradients
from tests.support.tiny import SEQ_LEN, fit, tiny_task, tiny_train, tiny_trainer
from trainer.config import ParallelConfig

SAMPLES = 2
"""In a micro-batch of each shard rank."""

CASES: dict[str, dict[str, Any]] = {
    "context 4": {"parallel": {"context": 4}},
    "context 2 in shard 2, texts apart": {
        "parallel": {"shard": 2, "context": 2},
        "task": {"texts": "apart"},
    },
    "context 2 over tensor 2, chunked head": {
        "parallel": {"context": 2, "tensor": 2},
        "task": {"loss_chunk": 3},
    },
    "context 4, texts apart, attention kept": {
        "parallel": {"context": 4},
        "task": {"texts": "apart"},
        "train": {"recompute": "selective"},
    },
    "context 2 in shard 2, recomputed": {
        "parallel": {"shard": 2, "context": 2},
        "train": {"recompute": "full"},
    },
    "shard 4, resharded to 2": {"parallel": {"shard": 4, "reshard_after_forward": 2}},
    "shard 4, kept": {"parallel": {"shard": 4, "strategy": "SHARD_GRAD_OP"}},
    "shard 2 over tensor 2, kept, texts apart": {
        "parallel": {"shard": 2, "tensor": 2, "reshard_after_forward": False},
        "task": {"texts": "apart"},
    },
    "context 2 over tensor 2, bfloat16": {
        "parallel": {"context": 2, "tensor": 2},
        "train": {"precision": "bfloat16"},
    },
}


@pytest.fixture(scope="module")
def make(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    cache = str(tmp_path_factory.mktemp("cache"))

    def make(
        *,
        parallel: Mapping[str, Any],
        task: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
    ) -> Case:
        # Short texts, so that several lie in a sample of 16 tokens.
        short = text.parent / "short texts"
        if not short.exists():
            short.mkdir()
            for index in range(60):
                words = ["alpha", "beta", "gamma", "delta"][: 1 + index % 4]
                (short / f"{index:02}.txt").write_text(f"{' '.join(words)} {index}")
        run = tiny_train(
            short,
            lanes=2,
            global_batch=16,
            parallel=ParallelConfig(**parallel),
            **{"steps": 4, "micro_batch": 2, **(train or {})},
        )
        run.check(2)
        prepared = replace(tiny_task(short), **(task or {})).prepare(run, cache)
        return Case(task=prepared, train=run)

    return make


@pytest.fixture(scope="module")
def found(make: Callable[..., Case]) -> dict[str, tuple[Case, Found]]:
    cases = [make(**case) for case in CASES.values()]
    return dict(zip(CASES, zip(cases, gradients_of(cases, SAMPLES), strict=True), strict=True))


def plain(case: Case) -> Found:
    """The same samples in plain transformers, texts that are apart one after the other."""
    task, data = case.task, case.task.train_data()
    tokens: Any = data
    texts = []
    samples = SAMPLES * case.train.parallel.shard
    for sample in range(samples):
        window = tokens.tokens.read(sample * SEQ_LEN, SEQ_LEN + 1).astype(np.int64)
        begins = [0, *(at + 1 for at in range(SEQ_LEN - 1) if window[at] == task.end_id)]
        pairs = zip(begins, [*begins[1:], SEQ_LEN], strict=True)
        texts += [torch.from_numpy(window[start : end + 1]) for start, end in pairs]
    assert (len(texts) > samples) == (task.end_id is not None)
    return plain_gradients(task, case.train.seed, texts)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(
    found: dict[str, tuple[Case, Found]], name: str
) -> None:
    """Float32: a sum of a few hundred terms in another order. bfloat16 has 8 bits."""
    case, divided = found[name]
    whole, bound = plain(case), 3e-2 if case.train.precision == "bfloat16" else 5e-6
    assert divided.targets == whole.targets
    assert divided.loss == pytest.approx(whole.loss, rel=bound)
    assert divided.gradients.keys() == whole.gradients.keys()
    for parameter, gradient in whole.gradients.items():
        error = (divided.gradients[parameter] - gradient).norm() / gradient.norm()
        assert error < bound, parameter


def test_bits_do_not_depend_on_the_number_of_replicas(make: Callable[..., Case]) -> None:
    """Place by place, with an evaluation at the end."""
    case = make(parallel={"context": 2}, task={"texts": "apart"}, train={"steps": 3})
    one, two = (run_layout(case.task, case.train, replicas=n, lanes=2) for n in (1, 2))
    for index, worker in enumerate(two):
        same = one[index % 2]
        assert isinstance(worker, WorkerResult), worker
        assert (worker.losses, worker.norms) == (same.losses, same.norms)
        assert worker.digests == same.digests
        assert worker.evaluations == same.evaluations
        for name, (_, _, value) in worker.local.items():
            assert torch.equal(value, same.local[name][2]), name
    ((_, loss, tokens),) = one[0].evaluations
    assert 0 < loss < 10
    assert tokens == len(case.task.eval_data() or ()) * SEQ_LEN or tokens == 16 * SEQ_LEN


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"context": 2}, marks=pytest.mark.slow),
        pytest.param({"shard": 4, "reshard_after_forward": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_killed_workers_leave_no_trace(
    cluster: None, text: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """In a ring's backward and in a forward: the replica breaks, is formed anew and healed. The
    bits are those of one replica that nothing happened to."""
    train = tiny_train(
        text,
        task=replace(tiny_task(text), texts="apart"),
        parallel=ParallelConfig(**parallel),
        steps=40,
    )
    size = train.parallel.workers
    whole = fit(tiny_trainer(text, tmp_path, name="whole", train=train, replicas=1))
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            train=train,
            replicas=2,
            min_replicas=2,
            faults=f"kill@8.backward:{size + 1},kill@20.forward:0",
            spares=2,
        )
    )
    assert broken.report["faults_fired"] == 2
    assert broken.report["lost_steps"] == 0
    assert broken.report["replicas_equal"] is True
    assert broken.samples == whole.samples
    assert broken.losses == whole.losses
    assert broken.params == whole.params
