"""A worker's own time is without what it waits for its peers in the collectives of its replica."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.support.data_plane import run_layout
from tests.support.tiny import tiny_task, tiny_train
from trainer.tasks.causal_lm import PreparedCausalLM

SLOW_RANK, COMPUTE_S = 1, 0.25
"""Of the processor, in each forward of one worker, more than the others have to compute."""


@dataclass(frozen=True, kw_only=True)
class OneSlow(PreparedCausalLM):
    """One worker of the replica computes for longer."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """See PreparedTask."""
        until = time.thread_time() + COMPUTE_S
        while model.training and dist.get_rank() == SLOW_RANK and time.thread_time() < until:
            pass
        return super().loss(model, batch)


@pytest.mark.parametrize("layout", [{"shard": 2}, {"tensor": 2}], ids=["shard", "tensor"])
def test_only_the_worker_that_computes_for_longer_has_more_time_of_its_own(
    text: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    train = tiny_train(text, steps=6, global_batch=4, **layout)
    prepared = tiny_task(text).prepare(train, str(tmp_path))
    workers = run_layout(OneSlow(**vars(prepared)), train, replicas=1, lanes=1)
    assert not [worker for worker in workers if isinstance(worker, Exception)], workers
    waits, slow = workers
    assert len(slow.own) == train.steps - 2
    assert all(own.micro_batches == 1 and own.tokens > 0 for own in slow.own)
    assert median(own.compute_s for own in slow.own) >= COMPUTE_S
    assert median(own.step_s for own in waits.own) >= COMPUTE_S, "it has waited"
    assert median(own.compute_s for own in waits.own) < COMPUTE_S / 2
