"""Starts a run on the cluster, or attaches to the one that goes on, and follows it to its end."""

from __future__ import annotations

import dataclasses
import logging
import platform
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ray.train import Checkpoint, Result, RunConfig

from checkpointing import CheckpointConfig, Manifest, S3Config, Snapshot
from checkpointing.config import Resume
from checkpointing.whole_file import write_whole
from elastic.config import HealthConfig, ScalingConfig, WorkerPlan
from elastic.coordinator.actor import MOST_CALLS, Coordinator
from elastic.coordinator.config import CoordinatorConfig
from elastic.driver.observer import Observer
from elastic.driver.preparing import prepare_task
from elastic.driver.resources import (
    check_device,
    check_kinds,
    check_nodes,
    check_spares,
    find_unused,
    wait_for_workers,
)
from elastic.driver.resume import (
    KINDS,
    Origin,
    add_snapshot,
    check_continues,
    check_found,
    check_function,
    find_stored,
    last_generation,
    local_path,
    remove_orphans,
    run_directory,
    run_root,
    set_others_aside,
    skips_of,
    steps_done,
    warn_of_older,
    warn_of_versions,
)
from elastic.driver.running import (
    check_same,
    find_run,
    follow,
    has_finished,
    is_leaving,
    is_starting,
    look_for_end,
    may_be_going_on,
)
from elastic.errors import RunGoesOnError, RunStoppedError
from elastic.membership.decisions import GroupConfig
from elastic.node.snapshot_survey import clear_snapshots, find_snapshot
from elastic.protocol import events
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.faults import Fault
from elastic.protocol.job import Job
from elastic.protocol.rpc import Remote
from elastic.protocol.run_identity import RunIdentity, StateTable, identify, record_identity
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.supervisor_api import SupervisorApi
from elastic.protocol.versions import describe_change, own_version
from elastic.ray_compat.autoscaler import may_bring_nodes, most_on_a_node
from elastic.ray_compat.cluster import (
    accelerator_types,
    connect,
    has_started_one,
    start_actor,
    would_start_one,
)
from elastic.ray_compat.groups import end_all
from elastic.ray_compat.kept import Kept
from elastic.ray_compat.placement import Wanted
from elastic.ray_compat.trainer import controller_variables
from elastic.reporting.callback import Callback
from elastic.reporting.event_log import last_events, read_events
from elastic.reporting.phases import phases
from elastic.reporting.report import Report
from elastic.supervisor.plan import RunPlan
from elastic.supervisor.supervisor import MOST_DRIVERS, Supervisor
from trainer.backend.determinism import attention_kernels
from trainer.config import TrainConfig
from trainer.engine.build import build_model
from trainer.engine.optimizer import try_optimizer
from trainer.engine.state import state_table
from trainer.errors import ConfigError
from trainer.loop.samples import Ledger
from trainer.parallel.strategy import beyond_the_lanes
from trainer.progress import tell
from trainer.tasks.causal_lm import CausalLM, PreparedCausalLM
from trainer.tasks.custom import CustomTask
from trainer.tasks.task import PreparedTask, default_cache_dir

log = logging.getLogger(__name__)

_RECORDED_VERSIONS = ("torch", "ray", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """What a run starts with."""

    identity: RunIdentity
    model: StateTable
    """What its state is."""
    origin: Origin
    task: PreparedTask
    flops_per_token: dict[str, float]
    """Of the model, by counting."""


@dataclass(kw_only=True)
class Launch:
    """One call of `ElasticTrainer.fit`; the fields are its arguments."""

    train: TrainConfig
    scaling: ScalingConfig
    run_config: RunConfig
    checkpoint: CheckpointConfig
    health: HealthConfig
    faults: tuple[Fault, ...]
    callbacks: tuple[Callback, ...]
    lanes: int
    """Of the global batch; those of the run that is continued, once that is found."""

    def fit(self, *, detach: bool) -> Result:
        """See `ElasticTrainer.fit`."""
        try_optimizer(self.train.optimizer)
        if detach:
            _check_outlives()
            if self.callbacks:
                log.warning("detach = True: no callback is told of a run that is under way.")
        paths = RunPaths(root=run_root(self.run_config))
        run = None
        if may_be_going_on(paths):
            connect()
            run = _find_run_to_attach(paths, self.checkpoint.resume)
        if run is not None:
            about = run.call(SupervisorApi.about)
            self.lanes = about.job.lanes
            check_same(
                about.job,
                train=self.train,
                scaling=self.scaling,
                checkpoint=self.checkpoint,
                health=self.health,
            )
            log.warning("the run in %s is going on: attached to it", paths.root)
            _tell_other_versions(paths)
            observer = Observer(paths, self.callbacks, attaches=True)
            paths, coordinator, task_info = about.job.paths, about.job.coordinator, about.task_info
            prefix = paths.prefix_of(about.job.attempt)
        else:
            directory = run_directory(self.run_config, self.checkpoint, self._claim)
            with directory as paths, phases(sys.stderr):
                finished = self._find_end(paths)
                if finished is None:
                    ready = self._prepare(paths)
                    started = self._start(paths, ready)
            if finished is not None:
                log.warning("the run in %s is over: all its steps are done", paths.root)
                observer = Observer(paths, self.callbacks)
                observer.start()
                return _result(paths, observer.finish(), finished)
            task_info = ready.task.info
            run, coordinator, prefix, observer = started
        if detach:
            return Result(metrics=None, checkpoint=None, error=None, path=str(paths.root))
        # At once: until then, a signal would leave the run going on.
        return _result(paths, follow(run, coordinator, prefix, observer), task_info)

    def _claim(self, paths: RunPaths) -> None:
        """Ends what lives on of a start whose supervisor is gone, before it is looked what there is
        to go on from: its workers train, and its coordinator commits. The run's lock is held. The
        supervisor of a start of a moment ago may be waiting for it, and ends if it waits too long:
        so this comes before anything is prepared.

        Raises:
            RunGoesOnError: see `_end_leftovers`.
        """
        moves = self.checkpoint.resume == "never" and paths.root.exists()
        if moves or may_be_going_on(paths) or is_starting(paths):
            connect()
            _end_leftovers(paths)

    def _find_end(self, paths: RunPaths) -> Mapping[str, Any] | None:
        """The facts of the task of a run that has done all its steps; None where there is something
        to do. Needs no cluster, and of text not the data, which are not compared; a task that is
        not of this package is prepared.

        Raises:
            ConfigError: it had other settings, or another model.
        """
        if not has_finished(paths):
            return None
        identity = identify(paths)
        saved = paths, read_events(paths.events, kinds=KINDS), identity
        last = self._settle(paths, identity, find_stored(*saved, None)).manifest
        if last is None or last.step != self.train.steps:
            return None
        info: Mapping[str, Any] = last.training_state.get("task", {})
        task = self.train.task
        if isinstance(task, CausalLM):
            task = PreparedCausalLM.without_text(self.train, info.get("vocab_size", 0))
        elif not isinstance(task, PreparedCausalLM | CustomTask):  # its model may come of its data
            task = prepare_task(self.train, default_cache_dir(local_path(self.run_config)))
        model = build_model(task, self.train)[0]
        table = state_table(model, self.train.optimizer)
        self._settle(paths, identity, find_stored(*saved, table))
        check_function(paths, last, task)
        return info

    def _prepare(self, paths: RunPaths) -> _Ready:
        """All that is done before the cluster is needed, on CPU; the errors of bad input come from
        here."""
        if self.scaling.device == "cuda":
            connect()
            check_device(self.scaling)
            if isinstance(self.train.task, CausalLM):
                self.train.task.check_gpu(self.train)
        tell(f"looking for a state to go on from in {paths.checkpoints}")
        identity = identify(paths)
        saved = paths, read_events(paths.events, kinds=KINDS), identity
        stored = find_stored(*saved, None)
        snapshot = self._find_snapshot(paths, stored.manifest)
        self._settle(paths, identity, add_snapshot(stored, identity, snapshot, None))
        of_text = isinstance(self.train.task, CausalLM)
        if of_text:
            self._check_memory(None)
        task = prepare_task(self.train, default_cache_dir(local_path(self.run_config)))
        if not of_text:
            self._check_memory(task)
        tell("building the model on the driver, without weights")
        built = build_model(task, self.train)[0]
        model = state_table(built, self.train.optimizer)
        stored = find_stored(*saved, model)
        origin = add_snapshot(stored, identity, snapshot, model)
        self._settle(paths, identity, origin, task)
        warn_of_older(paths, origin)
        if origin.manifest is not None:
            warn_of_versions(origin.manifest, _versions())
        return _Ready(
            identity=identity,
            model=model,
            origin=origin,
            task=task,
            flops_per_token=dict(task.flops_per_token(built)),
        )

    def _check_memory(self, task: PreparedTask | None) -> None:
        """A dry run for workers on GPUs: of text it needs no data, which take hours to prepare; of
        another task it takes the prepared one."""
        if self.scaling.device != "cuda":
            return
        from elastic.driver.memory import check_memory  # seconds of imports

        tell("a dry run: does a worker fit its GPU?")
        train = dataclasses.replace(self.train, lanes=self.lanes)
        gpus = int(most_on_a_node("GPU"))
        check_memory(train, self.scaling, accelerator_types(), gpus, task)

    def _start(
        self, paths: RunPaths, ready: _Ready
    ) -> tuple[Remote[SupervisorApi], Remote[CoordinatorApi], str, Observer]:
        """Starts the run: from here on it belongs to the cluster. Returns its supervisor, its
        coordinator, the prefix of its names, and the observer."""
        identity, model, origin, task = ready.identity, ready.model, ready.origin, ready.task
        tell("joining the Ray cluster")
        connect()
        _end_leftovers(paths)  # they may hold what the workers need
        for unused in find_unused(self.scaling, self.train, most_on_a_node("GPU")):
            log.warning("%s", unused)
        check_nodes(self.scaling, self.train.parallel)
        self._say_layout()
        tell("waiting for the resources of the smallest layout")
        plan = wait_for_workers(self.scaling, self.train.parallel)
        check_spares(self.scaling, self.train.parallel)
        if self.scaling.device == "cuda" and not may_bring_nodes():
            check_kinds(self.train, accelerator_types())
        record_identity(paths, identity)
        if self.checkpoint.memory_every is not None and not paths.events.exists():
            clear_snapshots(paths)  # not before: a refused start may be of a run that goes on
        surveyor = set_others_aside(paths, origin, identity, model)
        remove_orphans(surveyor, last_generation(origin) + 1)
        tell(f"what its workers will write: elastic logs {paths.root}")
        tell("starting the run: coordinator, supervisor, workers")
        attempt = secrets.randbits(31)
        prefix = paths.prefix_of(attempt)
        config = self._coordinator_config(paths, ready, plan, prefix)
        observer = Observer(paths, self.callbacks)
        write_whole(paths.starting, repr(config.started.time), durable=True)
        try:
            coordinator = start_actor(
                Coordinator,
                max_concurrency=MOST_CALLS,
                restarts=True,
                name=f"{prefix}coordinator",
            )(Kept.keep(f"{prefix}config", config))
            job = Job(
                train=dataclasses.replace(self.train, task=None),
                task=task,
                lanes=self.lanes,
                scaling=self.scaling,
                checkpoint=self.checkpoint,
                health=self.health,
                paths=paths,
                identity=identity,
                attempt=attempt,
                secret=secrets.token_bytes(),
                faults=self.faults,
                coordinator=coordinator,
            )
            run = start_actor(
                Supervisor,
                max_concurrency=MOST_DRIVERS,
                restarts=True,
                name=paths.key,
                variables=controller_variables(),
            )(Kept.keep(f"{prefix}plan", self._run_plan(job, plan, prefix, config.started.time)))
        except BaseException:
            end_all(prefix)
            raise
        return run, coordinator, prefix, observer

    def _say_layout(self) -> None:
        """What the layout is called, and what follows from it for a fault: a warning where one
        worker's loss costs steps and nobody takes snapshots, and where replicas have no lanes."""
        layout = self.train.parallel.layout(self.scaling.max_replicas)
        carried = layout.replicas > 1 or self.checkpoint.memory_every is not None
        if carried:
            tell(f"layout: {layout}")
        else:
            log.warning("layout: %s", layout)
        if (told := beyond_the_lanes(layout.replicas, self.lanes)) is not None:
            log.warning("%s", told)

    def _run_plan(self, job: Job, plan: WorkerPlan, prefix: str, began: float) -> RunPlan:
        return RunPlan(
            job=job,
            workers=plan.workers(self.train.parallel),
            wanted=Wanted(
                replicas=self.scaling.max_replicas,
                workers_per_replica=self.train.parallel.workers,
                spares=self.scaling.spares,
                together=self.train.parallel.dims.together,
                min_replicas=self.scaling.min_replicas,
            ),
            run_config=dataclasses.replace(
                self.run_config, storage_path=local_path(self.run_config)
            ),
            prefix=prefix,
            began=began,
        )

    def _settle(
        self,
        paths: RunPaths,
        identity: RunIdentity,
        origin: Origin,
        task: PreparedTask | None = None,
    ) -> Origin:
        """Checks what to go on from, with the `task` once it is prepared, and takes its lanes."""
        check_found(paths, identity, self.checkpoint.resume, origin)
        if origin.manifest is not None:
            check_continues(paths, origin.manifest, self.train, task)
            if self.train.lanes is None:
                # They belong to the run; an imported checkpoint has none.
                self.lanes = int(origin.manifest.training_state.get("lanes", self.lanes))
        self.train.check(self.lanes)
        return origin

    def _find_snapshot(self, paths: RunPaths, stored: Manifest | None) -> Snapshot | None:
        if self.checkpoint.memory_every is None:
            return None
        if stored is not None:
            check_continues(paths, stored, self.train)  # before a cluster is started to look for it
        connect()
        return find_snapshot(paths)

    def _coordinator_config(
        self,
        paths: RunPaths,
        ready: _Ready,
        plan: WorkerPlan,
        prefix: str,
    ) -> CoordinatorConfig:
        origin, parallel = ready.origin, self.train.parallel
        regather = parallel.dims.regather
        stored = origin.stored
        start_step = 0 if origin.manifest is None else origin.manifest.step
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
            identity=ready.identity,
            prefix=prefix,
            health=self.health,
            checkpoint=self.checkpoint,
            generation=last_generation(origin),
            faults=self.faults,
            ledger=Ledger(
                seed=self.train.seed,
                global_batch=self.train.global_batch,
                lanes=self.lanes,
                samples=len(ready.task.train_data()),
                skips=skips_of(origin),
            ),
            reads=(
                *(ready.task.token_files if isinstance(ready.task, PreparedCausalLM) else ()),
                *([str(paths.identity)] if paths.store is None else []),
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
                    "spares": self.scaling.spares,
                },
                steps=self.train.steps,
                start_step=start_step,
                redone_steps=max(0, steps_done(paths) - start_step),
                settings={
                    "precision": self.train.precision,
                    "reduction": self.train.reduction,
                    "determinism": self.train.determinism,
                    "attention": attention_kernels(self.train.determinism, self.scaling.device),
                    "compile": self.train.compile,
                    "strategy": parallel.layout(self.scaling.max_replicas).strategy,
                    "reshard_after_forward": str({None: True, 1: False}.get(regather, regather)),
                    "workers_per_node": str(parallel.workers_per_node),
                },
                versions=_versions(),
                precision=self.train.precision,
                flops_per_token=ready.flops_per_token,
                terms="tokens" if "train_tokens" in ready.task.info else "terms",
                store="" if paths.store is None else str(paths.store),
                store_settings=paths.store.settings if isinstance(paths.store, S3Config) else {},
            ),
        )


def _versions() -> dict[str, str]:
    """What goes into the records: of this process, which prepares the task."""
    return {
        "python": platform.python_version(),
        "elastictrainer": own_version(),
        **{name: version(name) for name in _RECORDED_VERSIONS},
    }


def _tell_other_versions(paths: RunPaths) -> None:
    """Warns where the run that is attached to has other versions than this program."""
    for started in last_events(paths.events, events.RunStarted):
        assert isinstance(started, events.RunStarted)
        if changed := describe_change(started.versions, _versions()):
            log.warning(
                "the run was started with other versions than this program has, and keeps them "
                "until it is stopped and started again: %s",
                changed,
            )


def _check_outlives() -> None:
    """Warns where the cluster ends with this program, which has started it.

    Raises:
        ConfigError: there is none yet, so `fit` would start one.
    """
    fact = "the run would end with this program, which starts the Ray cluster itself"
    fix = "Start one first (`ray start --head`), set RAY_ADDRESS, or leave detach out"
    if would_start_one():
        raise ConfigError("detach", True, fact, fix)
    if has_started_one():
        log.warning("detach = True: %s. %s.", fact, fix)


def _find_run_to_attach(paths: RunPaths, resume: Resume) -> Remote[SupervisorApi] | None:
    """The run that is going on; see `find_run`. One that ends as its driver was told to go is
    waited for, and then gone on with: a platform that moves a driver starts it again, and it would
    take that end for somebody's will. Not where this driver would begin anew.

    Raises:
        RunStoppedError: somebody has ended it meanwhile.
    """
    while (run := find_run(paths)) is not None:
        job = run.call(SupervisorApi.about).job
        prefix, ending = job.paths.prefix_of(job.attempt), None
        if resume == "never" or not is_leaving(job.paths, prefix):
            break
        log.warning("the run in %s saves and stops: waiting for that, to go on with it", paths.root)
        while ending is None and is_leaving(job.paths, prefix):
            ending = look_for_end(run, paths)
        if ending is not None and ending.interrupted:
            raise RunStoppedError(str(paths.root), "interrupted", steps_done(paths))
    return run


def _end_leftovers(paths: RunPaths) -> None:
    """Ends what an earlier start of the run, without a supervisor now, has left on the cluster.

    Raises:
        RunGoesOnError: there is a supervisor: another driver has just started the run. Its lock may
            be free then, until the supervisor takes it.
    """
    if find_run(paths) is not None:
        raise RunGoesOnError(
            "run_config.name",
            paths.root.name,
            "a run of this name has just been started",
            f"Run the same command again to attach to it, where {paths.root} is mounted as it is "
            f"for the run, or use another name",
        )
    end_all(f"{paths.key}/")


def _result(paths: RunPaths, report: Report, task_info: Mapping[str, Any]) -> Result:
    return Result(
        metrics={
            **report.to_json(),
            "task": dict(task_info),
            "checkpoint_store": str(paths.checkpoints),
        },
        checkpoint=Checkpoint(str(paths.checkpoints)) if paths.store is None else None,
        error=None,
        path=str(paths.root),
    )
