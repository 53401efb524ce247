"""`ElasticTrainer(...).fit()`: configuration in, `ray.train.Result` out.

Brings neither torch nor Ray: whoever has only a configuration to write waits for neither. A trainer
that is made brings Ray Train's configuration, and `fit` the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from checkpointing import CheckpointConfig
from elastic.config import HealthConfig, ScalingConfig
from elastic.driver.arguments import check_arguments, warn_of_no_name
from elastic.exit_status import tell_exit_status
from elastic.imports import uncollected
from elastic.protocol.faults import Fault, check_faults
from elastic.reporting.callback import Callback
from elastic.reporting.phases import phases
from trainer.config import TrainConfig
from trainer.progress import tell

if TYPE_CHECKING:
    from ray.train import Result, RunConfig

tell_exit_status()

_reads_only = False
"""Whether this process runs a program only to see the trainers in it."""


class FitReached(BaseException):
    """A program that is only read has come to its `fit`. No `except Exception` of it goes on."""


@contextmanager
def reading_only() -> Iterator[None]:
    """In this block `fit` starts nothing and attaches to nothing: it raises FitReached."""
    global _reads_only
    _reads_only = True
    try:
        yield
    finally:
        _reads_only = False


class ElasticTrainer:
    """Trains a model on a Ray cluster, through the loss of workers, to the weights of an
    undisturbed run.

    Args:
        train: what to learn: task (model, loss, data), optimizer, steps, global batch, parallel
            layout.
        scaling: how many replicas and spares, on what device.
        run_config: Ray Train's own: `name`, `storage_path`, `worker_runtime_env` and
            `logging_config` are used; another field that is set is refused. Running the same name
            again continues it; without a name each start is another run. Links in `storage_path`
            count as they are written: through another one it is another run.
        checkpoint: when to save, and whether to resume.
        health: timeouts and budgets.
        faults: faults to inject, to show recovery (`elastic.parse_faults`).
        callbacks: told in this process of each step and event that is recorded while it follows the
            run, and of the end.

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
        from ray.train import RunConfig

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

    def fit(self, *, detach: bool = False) -> Result:
        """Runs to the end. Where this very run is going on already, attaches to it.

        The run belongs to the cluster: it goes on where this process is killed, and the same
        command attaches again. The first Ctrl-C or SIGTERM has it save and stop.

        Args:
            detach: return once the run is under way. `elastic attach` shows it, `elastic stop`
                stops it, the same command without `detach` waits for its end. Needs a Ray cluster
                that outlives this program (`ray start`).

        Returns:
            Ray Train's Result; `metrics` holds the report's numbers and, as `checkpoint_store`,
            where the checkpoints lie; `checkpoint` is their directory, None with a
            `CheckpointConfig.store`; `path` is the run directory with the report and the records.
            With `detach`, `metrics` and `checkpoint` are None.

        Raises:
            ConfigError: before any worker starts.
            ResourcesError: before any worker starts; the cluster has too little.
            RunFailedError: the run ended with an error; the message holds it, user tracebacks
                included.
            RunStoppedError: somebody else has stopped the run (`elastic stop`, a signal to another
                program that was attached to it).
        """
        if _reads_only:
            raise FitReached
        warn_of_no_name(self.run_config)
        with phases(sys.stderr), uncollected():
            tell("importing torch and Ray Train")
            from elastic.driver.launch import Launch

        launch = Launch(
            train=self.train,
            scaling=self.scaling,
            run_config=self.run_config,
            checkpoint=self.checkpoint,
            health=self.health,
            faults=self.faults,
            callbacks=self.callbacks,
            lanes=self.lanes,
        )
        try:
            return launch.fit(detach=detach)
        finally:
            self.lanes = launch.lanes  # a run that is continued keeps its own
