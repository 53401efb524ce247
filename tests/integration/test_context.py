"""Workers that share the tokens of each sample compute what one process computes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.test_layouts import single_process
from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from tests.support.tiny import tiny_task, tiny_train
from trainer.config import ParallelConfig, TrainConfig
from trainer.tasks.causal_lm import PreparedCausalLM

LANES, STEPS = 2, 4


class Lab:
    """The run under test in its layouts, and what a plain loop makes of it; each made once."""

    def __init__(self, text: Path, cache: str) -> None:
        self.text, self.cache = text, cache
        self.reference = functools.cache(self._reference)

    def train(self, **changes: Any) -> TrainConfig:
        parallel = {n: changes.pop(n) for n in ("shard", "context", "tensor") if n in changes}
        return tiny_train(
            self.text,
            steps=STEPS,
            lanes=LANES,
            micro_batch=2,
            global_batch=8,
            parallel=ParallelConfig(**parallel),
            **changes,
        )

    def task(self, train: TrainConfig, **changes: Any) -> PreparedCausalLM:
        return replace(tiny_task(self.text), **changes).prepare(train, self.cache)

    def _reference(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        train = self.train()
        return single_process(self.task(train), train)

    def run(self, replicas: int, *, task: dict[str, Any] | None = None, **changes: Any) -> Any:
        train = self.train(**changes)
        train.check(LANES)
        prepared = self.task(train, **(task or {}))
        results = run_layout(prepared, train, replicas=replicas, lanes=LANES)
        for worker in results:
            assert isinstance(worker, WorkerResult), worker
        return results


@pytest.fixture(scope="module")
def lab(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(text, str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize(
    ("layout", "task"),
    [
        ({"context": 2}, {}),
        ({"context": 4}, {"loss_chunk": 3}),
        ({"shard": 2, "context": 2}, {}),
        ({"context": 2, "tensor": 2}, {"loss_chunk": 5}),
    ],
)
def test_a_ring_agrees_with_a_plain_loop(
    lab: Lab, layout: dict[str, int], task: dict[str, Any]
) -> None:
    """Bounds as in test_layouts."""
    results = lab.run(1, task=task, **layout)
    losses, parameters = lab.reference()
    for worker in results:
        np.testing.assert_allclose(worker.losses, losses, rtol=2e-5)
        assert worker.digests == results[0].digests
    got = full_parameters(results)
    assert got.keys() == parameters.keys()
    for name, value in parameters.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-4, msg=message)
