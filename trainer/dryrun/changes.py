"""Settings that need less memory, from the cheapest on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from trainer.config import OffloadConfig, TrainConfig
from trainer.replication.lanes import plan_lane_buffers

_CHUNK_TOKENS = 1024


class Change(NamedTuple):
    """Settings in the place of a run's."""

    text: str
    """What is other, as the user writes it."""
    train: TrainConfig
    """With it."""
    replicas: int
    """With it."""


_Step = tuple[str, dict[str, Any]]
"""A setting as the user writes it, and as fields of a TrainConfig."""


def plan_changes(
    train: TrainConfig, replicas: int, *, blocks: bool, smaller: bool = True
) -> Iterator[Change]:
    """What to try: nothing that changes what is learned. First what costs least, each by itself;
    then what holds fewer activations, each on top of those before it; then another layout, of the
    same lanes. What is offloaded is tried beside these: the host may lack the room for it.

    Args:
        train: the settings of the run.
        replicas: that it has at most.
        blocks: whether the model has repeated blocks.
        smaller: whether smaller micro-batches learn the same.
    """
    lanes = train.lanes or replicas
    light, lighter = _light(train, lanes, replicas), list[_Step]()
    for step in light:
        yield _change(train, [step], replicas)
    if blocks and train.recompute != "full":
        lighter.append(('recompute="full"', {"recompute": "full"}))
        yield _change(train, lighter, replicas)
    task: Any = train.task
    if getattr(task, "loss_chunk", 0) is None:
        chunked = {"task": replace(task, loss_chunk=_CHUNK_TOKENS)}
        lighter.append((f"loss_chunk={_CHUNK_TOKENS}", chunked))
        yield _change(train, lighter, replicas)
    away: list[_Step] = []
    if blocks and train.offload is None:
        away = [("offload=OffloadConfig()", {"offload": OffloadConfig()})]
        yield _change(train, [*lighter, *away], replicas)
    if smaller and train.micro_samples(lanes) > 1:
        lighter.append(("micro_batch=1", {"micro_batch": 1}))
        yield _change(train, lighter, replicas)
        if away:
            yield _change(train, [*lighter, *away], replicas)
    if light and (lighter or len(light) > 1):
        lighter += light
        yield _change(train, lighter, replicas)
    for factor in (2, 4, 8, 16):
        shard = factor * train.parallel.shard
        if replicas % factor or train.global_batch % (lanes * shard):
            return
        parallel, fewer = replace(train.parallel, shard=shard), replicas // factor
        sharded = {"parallel": parallel, "lanes": lanes}
        text = f"shard={shard}, max_replicas={fewer}"
        if train.lanes is None:  # else there would be as many as replicas: other sums, other bits
            text += f", lanes={lanes}"
        other = replace(train, parallel=parallel)
        more = [step for step in _light(other, lanes, fewer) if step not in lighter]
        yield _change(train, [*lighter, *more, (text, sharded)], fewer)


def _light(train: TrainConfig, lanes: int, replicas: int) -> list[_Step]:
    """What changes no bit and computes nothing twice."""
    steps: list[_Step] = []
    if train.gather_ahead > 1 and train.parallel.dims.fsdp > 1:
        steps.append(("gather_ahead=1", {"gather_ahead": 1}))
    if plan_lane_buffers(train.lane_buffers, lanes, replicas, "cuda") != 1:
        steps.append(("lane_buffers=1", {"lane_buffers": 1}))
    return steps


def _change(train: TrainConfig, steps: Sequence[_Step], replicas: int) -> Change:
    text = ", ".join(text for text, _ in steps)
    fields = {name: value for _, step in steps for name, value in step.items()}
    return Change(text, replace(train, **fields), replicas)
