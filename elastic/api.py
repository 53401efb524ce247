"""`ElasticTrainer(...).fit()`: configuration in, `ray.train.Result` out."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.train import Checkpoint, Result, RunConfig, TrainingFailedError

from checkpointing import (
    CheckpointConfig,
    IncompatibleError,
    Keys,
    Manifest,
    StoreError,
    check_compatible,
    delete_checkpoint,
    list_steps,
    newest,
    open_store,
)
from elastic import events
from elastic.config import HealthConfig, ScalingConfig, WorkerPlan
from elastic.coordinator import CoordinatorConfig
from elastic.errors import RunFailedError
from elastic.faults import Fault, check_faults
from elastic.job import Job
from elastic.membership import GroupConfig
from elastic.observer import Observer, conclude
from elastic.ray_compat import ElasticRayTrainer, start_coordinator
from elastic.records import RunPaths
from elastic.resources import wait_for_workers
from elastic.worker import train_worker
from trainer.config import TrainConfig
from trainer.engine import MOMENTS, PARAMETERS
from trainer.errors import ConfigError
from trainer.task import PreparedTask, default_cache_dir, model_table

log = logging.getLogger(__name__)

_RECORDED_VERSIONS = ("torch", "ray", "transformers", "tokenizers", "numpy")


class ElasticTrainer:
    """Trains a model on a Ray cluster, through the loss of workers, to the weights of an
    undisturbed run.

    Args:
        train: what to learn: task (model, loss, data), optimizer, steps, global batch, parallel
            layout.
        scaling: how many replicas and spares, on what device.
        run_config: Ray Train's own: `name` and `storage_path` are used. Running the same name again
            continues it.
        checkpoint: when to save, and whether to resume.
        health: timeouts and budgets.
        faults: faults to inject, to show recovery (`elastic.parse_faults`).

    Raises:
        ConfigError: for a number that can be checked at once; `fit` checks the rest.
    """

    def __init__(
        self,
        train: TrainConfig,
        *,
        scaling: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        health: HealthConfig | None = None,
        faults: tuple[Fault, ...] = (),
    ) -> None:
        self.train = train
        self.scaling = scaling or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.checkpoint = checkpoint or CheckpointConfig()
        self.health = health or HealthConfig()
        self.faults = faults
        self.lanes = train.lanes or self.scaling.max_replicas
        self.scaling.check(train.parallel)
        self.health.check()
        train.check(self.lanes)
        check_faults(
            faults, steps=train.steps, slots=self.scaling.max_replicas * train.parallel.workers
        )

    def fit(self) -> Result:
        """Runs to the end.

        Returns:
            Ray Train's Result; `metrics` holds the report's numbers, `checkpoint` the final one,
            `path` the run directory with the report, the records and the checkpoints.

        Raises:
            ConfigError: before any worker starts.
            ResourcesError: before any worker starts; the cluster has too little.
            RunFailedError: the run ended with an error; the message holds it, user tracebacks
                included.
        """
        paths = self._open_run_directory()
        task = self.train.task.prepare(self.train, self._cache_dir())
        manifest = self._find_checkpoint(paths, task)
        self._take_lanes(manifest)
        if not ray.is_initialized():
            ray.init()
        plan = wait_for_workers(self.scaling, self.train.parallel)
        coordinator = start_coordinator(self._coordinator_config(paths, manifest, plan))
        try:
            result = self._run(coordinator, paths, task, plan)
        finally:
            ray.kill(coordinator)
        return result

    # -- before anything starts --------------------------------------------------------------------

    def _open_run_directory(self) -> RunPaths:
        """Checks the storage, and sets an earlier run of this name aside where `resume="never"`
        asks for it."""
        storage = str(self.run_config.storage_path)
        if "://" in storage and not storage.startswith("file://"):
            raise ConfigError(
                "run_config.storage_path",
                storage,
                "this version stores in a local or shared directory",
                "Use a directory that all nodes see",
            )
        paths = RunPaths(
            root=Path(storage.removeprefix("file://"), str(self.run_config.name)).absolute()
        )
        if self.checkpoint.resume == "never":
            try:
                aside = paths.set_aside()
            except OSError as error:
                raise _not_writable(storage, error) from error
            if aside is not None:
                log.warning("resume='never': the earlier run was moved to %s", aside)
        try:
            open_store(paths.checkpoints).check_writable()
        except StoreError as error:
            raise _not_writable(storage, error) from error
        return paths

    def _cache_dir(self) -> str:
        return default_cache_dir(str(self.run_config.storage_path).removeprefix("file://"))

    def _find_checkpoint(self, paths: RunPaths, task: PreparedTask) -> Manifest | None:
        """The checkpoint to go on from, checked against this run; None for a new run."""
        store, keys = open_store(paths.checkpoints), Keys()
        manifest = newest(store, keys)
        if manifest is None:
            if self.checkpoint.resume == "must":
                raise ConfigError(
                    "checkpoint.resume",
                    "must",
                    f"there is no checkpoint in {paths.checkpoints}",
                    "Check run_config.name and storage_path, or use resume='auto'",
                )
            return None
        self._check_same_model(manifest, task)
        self._check_same_data(manifest)
        for step in list_steps(store, keys):
            if step > manifest.step:  # passed over as unreadable; its steps are done again
                delete_checkpoint(store, keys, step)
        return manifest

    def _check_same_model(self, manifest: Manifest, task: PreparedTask) -> None:
        table = model_table(task, self.train.seed)
        tensors = {
            prefix + name: entry
            for name, entry in table.items()
            for prefix in (PARAMETERS, *MOMENTS)
            if prefix + name in manifest.tensors or prefix == PARAMETERS
        }
        try:
            check_compatible(manifest, tensors)
        except IncompatibleError as error:
            raise ConfigError(
                "run_config.name",
                self.run_config.name,
                f"its checkpoint of step {manifest.step} is of another model: {error}",
                "Use another name, the same model, or resume='never'",
            ) from error

    def _check_same_data(self, manifest: Manifest) -> None:
        for field in ("seed", "global_batch"):
            before, now = manifest.training_state[field], getattr(self.train, field)
            if before != now:
                raise ConfigError(
                    f"train.{field}",
                    now,
                    f"the run to be continued has {field} = {before}: samples would repeat or be "
                    f"left out",
                    f"Use {before}, another run_config.name, or resume='never'",
                )

    def _take_lanes(self, manifest: Manifest | None) -> None:
        """Lanes belong to the run: a run that is continued keeps its own, or the bits would
        change."""
        before = self.lanes if manifest is None else int(manifest.training_state["lanes"])
        if self.train.lanes is not None and self.train.lanes != before:
            raise ConfigError(
                "train.lanes",
                self.train.lanes,
                f"the run to be continued has {before} lanes",
                f"Use {before}, None, another run_config.name, or resume='never'",
            )
        self.lanes = before
        self.train.check(self.lanes)

    def _coordinator_config(
        self, paths: RunPaths, manifest: Manifest | None, plan: WorkerPlan
    ) -> CoordinatorConfig:
        step = 0 if manifest is None else manifest.step
        parallel = self.train.parallel
        return CoordinatorConfig(
            groups=GroupConfig(
                max_replicas=self.scaling.max_replicas,
                min_replicas=self.scaling.min_replicas,
                workers_per_replica=parallel.workers,
                tensor=parallel.tensor,
                lanes=self.lanes,
                steps=self.train.steps,
                start_workers=plan.replicas * parallel.workers + plan.spares,
            ),
            paths=paths,
            health=self.health,
            checkpoint=self.checkpoint,
            generation=0 if manifest is None else manifest.generation,
            restore_step=step,
            started=events.RunStarted(
                time=time.time(),
                name=str(self.run_config.name),
                layout={
                    "replicas": self.scaling.max_replicas,
                    "shard": parallel.shard,
                    "tensor": parallel.tensor,
                    "lanes": self.lanes,
                    "spares": plan.spares,
                },
                steps=self.train.steps,
                start_step=step,
                versions={
                    "python": platform.python_version(),
                    **{name: version(name) for name in _RECORDED_VERSIONS},
                },
            ),
        )

    # -- the run -----------------------------------------------------------------------------------

    def _run(
        self, coordinator: Any, paths: RunPaths, task: PreparedTask, plan: WorkerPlan
    ) -> Result:
        job = Job(
            train=dataclasses.replace(self.train, task=None),
            task=task,
            lanes=self.lanes,
            scaling=self.scaling,
            checkpoint=self.checkpoint,
            health=self.health,
            paths=paths,
            faults=self.faults,
            coordinator=coordinator,
        )
        trainer = ElasticRayTrainer(
            train_worker,
            job=job,
            coordinator=coordinator,
            workers=plan.replicas * self.train.parallel.workers + plan.spares,
            resources_per_worker=self.scaling.resources_per_worker,
            run_config=self.run_config,
        )
        observer = Observer(coordinator, paths)
        outcome: events.RunOutcome = "interrupted"
        error: str | None = None
        try:
            trainer.fit()
            outcome = "finished"
        except TrainingFailedError as failure:
            verdict = ray.get(coordinator.verdict.remote())
            if verdict is None:
                outcome, error = "failed", str(failure)
                raise
            if verdict.error is not None:
                outcome, error = "failed", verdict.error
                raise RunFailedError(error) from None
            outcome = "finished"  # a worker lost just before the end was not replaced any more
        finally:
            ray.get(coordinator.end.remote(outcome, error))
            observer.close()
            report = conclude(paths)
        return Result(
            metrics={**report.to_json(), "task": dict(task.info)},
            checkpoint=Checkpoint(str(paths.checkpoints)),
            error=None,
            path=str(paths.root),
        )


def _not_writable(storage: str, error: Exception) -> ConfigError:
    return ConfigError(
        "run_config.storage_path",
        storage,
        f"it cannot be written: {error}",
        f"Use a directory that user {os.getuid()} may write",
    )
