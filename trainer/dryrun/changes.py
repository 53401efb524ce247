"""Settings that need less memory, from the cheapest on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from trainer.config import TrainConfig

_CHUNK_TOKENS = 1024


class Change(NamedTuple):
    """Settings in the place of a run's."""

    text: str
    """What is other, as the user writes it."""
    train: TrainConfig
    """With it."""
    replicas: int
    """With it."""


def plan_changes(train: TrainConfig, replicas: int, *, blocks: bool) -> Iterator[Change]:
    """What to try, each on top of those before it: nothing that changes what is learned.

    Args:
        train: the settings of the run.
        replicas: that it has at most.
        blocks: whether the model has repeated blocks.
    """
    lanes = train.lanes or replicas
    told: list[str] = []
    if blocks and train.recompute != "full":
        train = replace(train, recompute="full")
        told.append('recompute="full"')
        yield Change(", ".join(told), train, replicas)
    task: Any = train.task
    if getattr(task, "loss_chunk", 0) is None:
        train = replace(train, task=replace(task, loss_chunk=_CHUNK_TOKENS))
        told.append(f"loss_chunk={_CHUNK_TOKENS}")
        yield Change(", ".join(told), train, replicas)
    if train.micro_samples(lanes) > 1:
        train = replace(train, micro_batch=1)
        told.append("micro_batch=1")
        yield Change(", ".join(told), train, replicas)
    for factor in (2, 4, 8, 16):
        shard = factor * train.parallel.shard
        if replicas % factor or train.global_batch % (lanes * shard):
            return
        changed = replace(train, parallel=replace(train.parallel, shard=shard), lanes=lanes)
        more = [*told, f"shard={shard}, max_replicas={replicas // factor}"]
        yield Change(", ".join(more), changed, replicas // factor)
