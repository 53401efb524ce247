"""What runs in the soak: the tiny task, paced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._chaos import LANES, STEPS, Layout, Schedule
from checkpointing import CheckpointConfig
from elastic import ElasticTrainer
from tests.support.paced import paced_task
from tests.support.tiny import tiny_train, tiny_trainer

EVAL_SAMPLES = 16


def settings_of(layout: Layout) -> dict[str, Any]:
    """What a run has in common with the undisturbed one. A lane has a sample for each shard rank,
    and two at least."""
    return {
        "shard": layout.shard,
        "tensor": layout.tensor,
        "lanes": LANES,
        "global_batch": LANES * max(2, layout.shard),
        "steps": STEPS,
        "eval_samples": EVAL_SAMPLES,
    }


def make_trainer(schedule: Schedule, text: Path, storage: Path) -> ElasticTrainer:
    """The run of a schedule, below `storage`."""
    layout, name = schedule.layout, schedule.name
    sample_s = schedule.evaluation_s * layout.shard / EVAL_SAMPLES  # ranks share an evaluation
    task = paced_task(text, storage, name, layout.replicas, schedule.patience_s, sample_s)
    return tiny_trainer(
        text,
        storage,
        name=name,
        # Samples pace the steps.
        train=tiny_train(text, task=task, eval_every=10, prefetch=0, **settings_of(layout)),
        replicas=layout.replicas,
        min_replicas=schedule.min_replicas,
        spares=schedule.spares,
        faults=",".join(map(str, schedule.faults)) or "none",
        checkpoint=CheckpointConfig(
            every_steps=schedule.save_every, memory_every=schedule.memory_every
        ),
        health=schedule.health,
    )
