"""What runs in the soak: the tiny task, or a somewhat larger one with the features that are drawn;
paced where something happens to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._chaos import LANES, STEPS, Layout, Schedule
from benchmarks._chaos_features import Features
from checkpointing import CheckpointConfig
from elastic import CausalLM, ElasticTrainer, OffloadConfig, OptimizerConfig, TrainConfig
from tests.support.paced import paced_task
from tests.support.tiny import tiny_task, tiny_train, tiny_trainer

EVAL_SAMPLES = 16
LAYERS = 4
"""Of a model with features: more than any horizon."""


def make_undisturbed(text: Path, layout: Layout, features: Features | None) -> TrainConfig:
    """The run that all of such a replica and such features are compared with.

    Raises:
        ConfigError: the driver of a run would not take it.
    """
    alone = None if features is None else features.alone
    train = make_train(text, make_task(text, features), layout, alone)
    train.check(LANES)
    train.parallel.layout(1)
    return train


def make_trainer(schedule: Schedule, text: Path, storage: Path) -> ElasticTrainer:
    """The run of a schedule, below `storage`."""
    layout, name = schedule.layout, schedule.name
    sample_s = schedule.evaluation_s * layout.shard / EVAL_SAMPLES  # ranks share an evaluation
    task = make_task(text, schedule.features)
    paced = paced_task(task, storage, name, layout.replicas, schedule.patience_s, sample_s)
    return tiny_trainer(
        text,
        storage,
        name=name,
        train=make_train(
            text,
            paced,
            layout,
            schedule.features,
            eval_every=10,
            profile=schedule.features and schedule.features.profile,
        ),
        replicas=layout.replicas,
        min_replicas=schedule.min_replicas,
        spares=schedule.spares,
        faults=",".join(map(str, schedule.faults)) or "none",
        checkpoint=CheckpointConfig(
            every_steps=schedule.save_every, memory_every=schedule.memory_every
        ),
        health=schedule.health,
    )


def make_task(text: Path, features: Features | None) -> CausalLM:
    """The task, as fast as it is."""
    if features is None:
        return tiny_task(text)
    hidden = features.hidden_size
    task = tiny_task(
        text, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=LAYERS
    )
    return replace(task, texts=features.texts, loss_chunk=features.loss_chunk)


def make_train(
    text: Path, task: Any, layout: Layout, features: Features | None, **changes: Any
) -> TrainConfig:
    """What a run has in common with the undisturbed one, and `changes`. A lane has a sample for
    each shard rank, and two at least."""
    asked = features or Features()
    train = tiny_train(
        text,
        task=task,
        parallel=asked.parallel(layout),
        lanes=LANES,
        global_batch=LANES * max(2, layout.shard),
        steps=STEPS,
        eval_samples=EVAL_SAMPLES,
        converters=asked.converters,
        precision=asked.precision,
        recompute=asked.recompute,
        offload=_offload(asked.horizon),
        reduce_dtype=asked.reduce_dtype,
        lane_buffers=asked.lane_buffers,
        prefetch=asked.prefetch,
        gather_ahead=asked.gather_ahead,
        bucket_bytes=asked.bucket_bytes,
        micro_batch=asked.micro_batch,
        **changes,
    )
    assert isinstance(train.optimizer, OptimizerConfig)
    narrow = replace(
        train.optimizer, moment_dtype=asked.moment_dtype, master_dtype=asked.master_dtype
    )
    return replace(train, optimizer=narrow)


def _offload(horizon: int | None) -> OffloadConfig | None:
    return None if horizon is None else OffloadConfig(horizon=horizon, least_bytes=1)
