"""Whether a worker fits its GPU, by a dry run before any worker starts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from ray import cloudpickle

from elastic.config import ScalingConfig
from trainer.config import TrainConfig
from trainer.dryrun.judge import Judge
from trainer.dryrun.machines import MACHINES, Machine
from trainer.dryrun.report import Report
from trainer.errors import ConfigError
from trainer.tasks.task import PreparedTask

log = logging.getLogger(__name__)

_KINDS = {
    "A100-40G": "p4d",
    "A100-80G": "p4de",
    "A100": "p4de",  # Ray may not say which: what fits neither is refused
    "H100": "p5",
    "H200": "p5e",
    "B200": "p6-b200",
    "B300": "p6-b300",
}
"""Ray's name of a GPU -> an instance of AWS that has it."""


def plan_memory(accelerators: Sequence[str], gpus: int) -> Machine | None:
    """A machine with the smallest GPU of the cluster; None where one is of an unknown kind. Its own
    memory is unknown: Ray's `memory` is what its user says, or what was free when Ray started.

    Args:
        accelerators: Ray's names of the kinds of GPU there.
        gpus: of the node with the most of them.
    """
    if not accelerators or any(kind not in _KINDS for kind in accelerators):
        return None
    machines = [MACHINES[_KINDS[kind]] for kind in accelerators]
    smallest = min(machines, key=lambda machine: machine.memory_bytes)
    return replace(smallest, gpus=gpus, host_memory_bytes=None)


def check_memory(
    train: TrainConfig,
    scaling: ScalingConfig,
    accelerators: Sequence[str],
    gpus: int,
    task: PreparedTask | None = None,
) -> None:
    """Warns where a worker may not fit its GPU. A layout that cannot be tried dry is let through.

    Args:
        train: the settings of the run, with its lanes.
        scaling: how many replicas.
        accelerators: Ray's names of the kinds of GPU on the cluster.
        gpus: of the node with the most of them.
        task: the run's, prepared, of which a copy is read: the workers get it as it is. None: it is
            made here, without its data.

    Raises:
        ConfigError: it will not fit: the message has the table, and what would; or the settings
            cannot work.
    """
    machine = plan_memory(accelerators, gpus)
    if machine is None:
        kinds = ", ".join(accelerators) or "unknown to Ray"
        log.warning("no dry run: the memory of these GPUs is not in its table: %s", kinds)
        return
    if dist.is_initialized():
        log.warning("no dry run: this process is in a process group, and it makes one of its own")
        return
    machine = machine.shared(scaling.gpus_per_worker)
    try:
        copy = None if task is None else cloudpickle.loads(cloudpickle.dumps(task))
        judge = Judge(device="cuda", machine=machine, nodes=None, task=copy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on how a model is made
            found = judge.judge(train, scaling.max_replicas)
            change = judge.nearest(train, scaling.max_replicas) if found.memory_refused else None
    except ConfigError:
        raise
    except Exception as error:  # of torch, on operators that it cannot try dry
        log.warning("no dry run: %s: %s", type(error).__name__, error)
        return
    if found.memory_refused:
        raise ConfigError(
            "train.parallel",
            str(train.parallel.dims),
            f"by a dry run a worker needs {_in_words(found, machine)}",
            f"Use {change.text}" if change else "Use GPUs with more memory",
        )
    if found.verdict != "fits":
        log.warning("a worker may not fit: by a dry run it needs %s", _in_words(found, machine))


def _in_words(found: Report, machine: Machine) -> str:
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in found.components.items())
    return f"{found.needed_bytes / 1e9:.1f} GB of {machine.memory_bytes / 1e9:.1f} ({parts})"
