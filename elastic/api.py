"""`ElasticTrainer(...).fit()`: configuration in, `ray.train.Result` out."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import secrets
import time
from importlib.metadata import version

import ray
from ray.train import Checkpoint, Result, RunConfig, TrainingFailedError

from checkpointing import CheckpointConfig, Snapshot
from elastic.config import HealthConfig, ScalingConfig, WorkerPlan
from elastic.coordinator.actor import MOST_CALLS, Coordinator
from elastic.coordinator.config import CoordinatorConfig
from elastic.driver.arguments import check_arguments
from elastic.driver.coordinator_watch import CoordinatorWatch
from elastic.driver.observer import Observer
from elastic.driver.resources import wait_for_workers
from elastic.driver.resume import (
    Origin,
    check_continues,
    check_found,
    find_origin,
    last_generation,
    local_path,
    remove_orphans,
    run_directory,
    set_others_aside,
)
from elastic.driver.stopping import Stopping
from elastic.errors import RunFailedError
from elastic.membership.decisions import GroupConfig
from elastic.node.snapshot_survey import clear_snapshots, find_snapshot
from elastic.protocol import events
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.faults import Fault, check_faults
from elastic.protocol.job import Job
from elastic.protocol.rpc import Remote
from elastic.protocol.run_identity import RunIdentity, StateTable, identify, record_identity
from elastic.protocol.run_paths import RunPaths
from elastic.providers.ray_drain import DrainWatch
from elastic.providers.tell import tell_coordinator
from elastic.ray_compat.cluster import draining_nodes, start_actor
from elastic.ray_compat.placement import Wanted
from elastic.ray_compat.trainer import ElasticRayTrainer
from elastic.reporting.callback import Callback
from elastic.worker.worker import train_worker
from trainer.config import TrainConfig
from trainer.engine.build import build_model
from trainer.engine.optimizer import try_optimizer
from trainer.engine.state import state_table
from trainer.loop.samples import Ledger
from trainer.tasks.task import PreparedTask, default_cache_dir

_RECORDED_VERSIONS = ("torch", "ray", "transformers", "tokenizers", "numpy")


class ElasticTrainer:
    """Trains a model on a Ray cluster, through the loss of workers, to the weights of an
    undisturbed run.

    Args:
        train: what to learn: task (model, loss, data), optimizer, steps, global batch, parallel
            layout.
        scaling: how many replicas and spares, on what device.
        run_config: Ray Train's own: `name`, `storage_path`, `worker_runtime_env` and
            `logging_config` are used; another field that is set is refused. Running the same name
            again continues it.
        checkpoint: when to save, and whether to resume.
        health: timeouts and budgets.
        faults: faults to inject, to show recovery (`elastic.parse_faults`).
        callbacks: told in this process of each step and event, and of the end.

    Raises:
        ConfigError: for an argument of another type, a field of `run_config` that is not used, or a
            number that can be checked at once; `fit` checks the rest.
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
        callbacks: tuple[Callback, ...] = (),
    ) -> None:
        check_arguments(
            train=train,
            scaling=scaling,
            run_config=run_config,
            checkpoint=checkpoint,
            health=health,
            faults=faults,
            callbacks=callbacks,
        )
        self.train = train
        self.scaling = scaling or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.checkpoint = checkpoint or CheckpointConfig()
        self.health = health or HealthConfig()
        self.faults = faults
        self.callbacks = callbacks
        self.lanes = train.lanes or self.scaling.max_replicas
        self.scaling.check(train.parallel)
        self.health.check()
        if train.lanes is not None:
            train.check(self.lanes)
        check_faults(faults, steps=train.steps, slots=self.scaling.slots(train.parallel))

    def fit(self) -> Result:
        """Runs to the end.

        Returns:
            Ray Train's Result; `metrics` holds the report's numbers and, as `checkpoint_store`,
            where the checkpoints lie; `checkpoint` is their directory, None where they lie on S3;
            `path` is the run directory with the report and the records.

        Raises:
            ConfigError: before any worker starts.
            ResourcesError: before any worker starts; the cluster has too little.
            RunFailedError: the run ended with an error; the message holds it, user tracebacks
                included.
        """
        try_optimizer(self.train.optimizer)
        with run_directory(self.run_config, self.checkpoint) as paths:
            identity, snapshot = identify(paths), self._find_snapshot(paths)
            self._find_origin(paths, identity, snapshot, None)  # before data is prepared for hours
            cache = default_cache_dir(local_path(self.run_config))
            task = self.train.task.prepare(self.train, cache)
            model = state_table(build_model(task, self.train)[0], self.train.optimizer.moments)
            origin = self._find_origin(paths, identity, snapshot, model)
            if origin.manifest is not None:
                check_continues(origin.manifest, self.train, task)
            _connect()
            plan = wait_for_workers(self.scaling, self.train.parallel)
            record_identity(paths, identity)
            set_others_aside(paths, origin.stored, identity, model)
            remove_orphans(paths, last_generation(paths, origin.manifest) + 1)
            config = self._coordinator_config(paths, origin, plan, task)
            observer = Observer(paths, self.callbacks)
            coordinator = start_actor(Coordinator, max_concurrency=MOST_CALLS, restarts=True)(
                config
            )
            try:
                with CoordinatorWatch(coordinator):
                    result = self._run(coordinator, observer, paths, identity, task, plan)
            finally:
                ray.kill(coordinator.handle)
            if self.checkpoint.memory_every is not None:
                clear_snapshots(paths)  # the run is finished, and its end is in the store
            return result

    def _find_origin(
        self,
        paths: RunPaths,
        identity: RunIdentity,
        snapshot: Snapshot | None,
        model: StateTable | None,
    ) -> Origin:
        """What to go on from, and with which lanes."""
        origin = find_origin(paths, identity, snapshot, model)
        check_found(paths, self.checkpoint.resume, origin)
        if origin.manifest is not None and self.train.lanes is None:
            # They belong to the run; an imported checkpoint has none.
            self.lanes = int(origin.manifest.training_state.get("lanes", self.lanes))
        self.train.check(self.lanes)
        return origin

    def _find_snapshot(self, paths: RunPaths) -> Snapshot | None:
        if self.checkpoint.memory_every is None:
            return None
        _connect()
        return find_snapshot(paths)

    def _coordinator_config(
        self,
        paths: RunPaths,
        origin: Origin,
        plan: WorkerPlan,
        task: PreparedTask,
    ) -> CoordinatorConfig:
        stored, manifest = origin.stored, origin.manifest
        parallel = self.train.parallel
        return CoordinatorConfig(
            groups=GroupConfig(
                max_replicas=self.scaling.max_replicas,
                min_replicas=self.scaling.min_replicas,
                dims=parallel.dims,
                lanes=self.lanes,
                steps=self.train.steps,
                start_workers=plan.workers(parallel),
                max_regroups_without_progress=self.health.max_regroups_without_progress,
            ),
            paths=paths,
            health=self.health,
            checkpoint=self.checkpoint,
            generation=last_generation(paths, manifest),
            faults=self.faults,
            ledger=Ledger(
                seed=self.train.seed,
                global_batch=self.train.global_batch,
                lanes=self.lanes,
                samples=len(task.train_data()),
            ),
            restore_step=0 if stored is None else stored.step,
            snapshot=origin.snapshot,
            started=events.RunStarted(
                time=time.time(),
                name=str(self.run_config.name),
                layout={
                    "replicas": self.scaling.max_replicas,
                    **parallel.dims.degrees,
                    "lanes": self.lanes,
                    "spares": plan.spares,
                },
                steps=self.train.steps,
                start_step=0 if manifest is None else manifest.step,
                versions={
                    "python": platform.python_version(),
                    **{name: version(name) for name in _RECORDED_VERSIONS},
                },
            ),
        )

    # -- the run -----------------------------------------------------------------------------------

    def _run(
        self,
        coordinator: Remote[CoordinatorApi],
        observer: Observer,
        paths: RunPaths,
        identity: RunIdentity,
        task: PreparedTask,
        plan: WorkerPlan,
    ) -> Result:
        job = Job(
            train=dataclasses.replace(self.train, task=None),
            task=task,
            lanes=self.lanes,
            scaling=self.scaling,
            checkpoint=self.checkpoint,
            health=self.health,
            paths=paths,
            identity=identity,
            attempt=secrets.randbits(31),
            faults=self.faults,
            coordinator=coordinator,
        )
        trainer = ElasticRayTrainer(
            train_worker,
            job=job,
            coordinator=coordinator,
            workers=plan.workers(self.train.parallel),
            wanted=Wanted(
                replicas=self.scaling.max_replicas,
                workers_per_replica=self.train.parallel.workers,
                spares=self.scaling.spares,
            ),
            resources_per_worker=self.scaling.resources_per_worker,
            run_config=self.run_config,
        )
        observer.start()
        watch = DrainWatch(draining_nodes, tell_coordinator(coordinator))
        outcome: events.RunOutcome = "interrupted"
        error: str | None = None
        stopping = Stopping(coordinator)
        try:
            with stopping:
                error = self._wait(trainer, coordinator)
            outcome = "failed" if error else "stopped" if stopping.asked else "finished"
        finally:
            watch.close()
            with contextlib.suppress(ray.exceptions.RayError):
                coordinator.call(CoordinatorApi.end, outcome, error)
            report = observer.finish()
        if error is not None:
            raise RunFailedError(error)
        stopping.settle()
        return Result(
            metrics={
                **report.to_json(),
                "task": dict(task.info),
                "checkpoint_store": str(paths.checkpoints),
            },
            checkpoint=Checkpoint(str(paths.checkpoints)) if paths.store is None else None,
            error=None,
            path=str(paths.root),
        )

    @staticmethod
    def _wait(trainer: ElasticRayTrainer, coordinator: Remote[CoordinatorApi]) -> str | None:
        """Waits for the end of the run. Returns why it failed, None where it is finished."""
        try:
            trainer.fit()
        except (TrainingFailedError, ray.exceptions.RayError) as failure:
            try:
                verdict = coordinator.call(CoordinatorApi.verdict)
            except ray.exceptions.RayError as gone:
                return f"the coordinator died ({gone}); run the same name again to continue"
            # A worker lost just before the end is not replaced any more: that is no failure.
            if verdict is not None:
                return verdict.error
            return f"Ray Train gave up; run the same name again to continue. It said: {failure}"
        return None


def _connect() -> None:
    """Joins the cluster, or starts one here, unless the driver has done so."""
    if not ray.is_initialized():
        ray.init()
