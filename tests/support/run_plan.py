"""What the driver makes of a small run: its supervisor's plan, and what the coordinator is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.train import RunConfig

from checkpointing import CheckpointConfig
from elastic import ElasticTrainer, HealthConfig, ScalingConfig, TrainConfig
from elastic.config import WorkerPlan
from elastic.coordinator.config import CoordinatorConfig
from elastic.driver.launch import Launch, _Ready
from elastic.driver.resume import Origin
from elastic.protocol.job import Job
from elastic.protocol.rpc import Remote
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.placement import Wanted
from elastic.supervisor.plan import RunPlan


def run_plan(paths: RunPaths, coordinator: Remote[Any]) -> RunPlan:
    """One worker without a task."""
    return RunPlan(
        job=Job(
            train=TrainConfig(task=None, steps=1, global_batch=1),
            task=None,
            lanes=1,
            scaling=ScalingConfig(max_replicas=1),
            checkpoint=CheckpointConfig(),
            health=HealthConfig(),
            paths=paths,
            identity=RunIdentity(id="this run"),
            attempt=0,
            secret=b"",
            faults=(),
            coordinator=coordinator,
        ),
        workers=1,
        wanted=Wanted(replicas=1, workers_per_replica=1, spares=0),
        run_config=RunConfig(name=paths.root.name, storage_path=str(paths.root.parent)),
        prefix=f"{paths.key}/0/",
        began=0.0,
    )


def ready_to_start(task: Any) -> _Ready:
    """A run from the seed, prepared."""
    return _Ready(
        identity=RunIdentity(id="this run"),
        model={},
        origin=Origin(stored=None, snapshot=None, passed=None),
        task=task,
        flops_per_token={},
    )


def told_to_the_coordinator(trainer: ElasticTrainer, storage: Path) -> CoordinatorConfig:
    """Of a run from the seed that has room for one replica."""
    return Launch(**vars(trainer))._coordinator_config(
        RunPaths(root=storage / "run", store=trainer.checkpoint.place("run")),
        ready_to_start(trainer.train.task),
        WorkerPlan(replicas=1, spares=0),
        "run/",
    )
