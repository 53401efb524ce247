"""A run's layout on machines: what it needs there, and what else would fit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from trainer.backend.groups import Device
from trainer.config import TrainConfig
from trainer.dryrun.changes import Change, plan_changes
from trainer.dryrun.machines import Machine
from trainer.dryrun.on_nodes import find_misfits
from trainer.dryrun.rank import dry_run
from trainer.dryrun.report import Report
from trainer.dryrun.shape import prepare_shape
from trainer.engine.build import build_model, family_of_task
from trainer.tasks.task import PreparedTask


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The machines that layouts are held against."""

    device: Device
    """What the workers compute on; a GPU wherever there is a machine."""
    machine: Machine | None
    """Their kind; None: unknown."""
    nodes: int | None
    """How many; None: as many as it takes."""
    task: PreparedTask | None = None
    """See `dry_run`."""

    def judge(self, train: TrainConfig, replicas: int) -> Report:
        """One dry run.

        Raises:
            ConfigError: the settings cannot work.
        """
        return Report(
            needs=dry_run(
                train,
                replicas=replicas,
                device="cuda" if self.machine else self.device,
                task=self.task,
            ),
            workers=replicas * train.parallel.workers,
            machine=self.machine,
            nodes=self.nodes,
            misfits=find_misfits(train.parallel, self.machine.gpus) if self.machine else (),
        )

    def nearest(self, train: TrainConfig, replicas: int) -> Change | None:
        """The first change that fits, by a dry run of each; None where none does. One that does not
        go with the model, or with the strategy that is wanted, is passed over, and so is one that
        cannot be tried dry."""
        task = self.task or prepare_shape(train)
        blocks = bool(family_of_task(task).blocks(build_model(task, train)[0]))
        smaller = not getattr(task, "router_coefficient", 0)  # a loss of each whole micro-batch
        for change in plan_changes(train, replicas, blocks=blocks, smaller=smaller):
            with suppress(Exception):  # of torch, and of a compiler
                change.train.parallel.layout(change.replicas)
                if self.judge(change.train, change.replicas).fits:
                    return change
        return None
