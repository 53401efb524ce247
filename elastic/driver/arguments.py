"""What `ElasticTrainer` is given: our own configurations, and of Ray Train's what is used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from checkpointing import CheckpointConfig
from checkpointing.field_types import type_name
from elastic.config import HealthConfig, ScalingConfig
from elastic.protocol.faults import Fault
from elastic.reporting.callback import Callback
from trainer.config import TrainConfig
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from ray.train import RunConfig

log = logging.getLogger(__name__)

_WANTED: dict[str, tuple[Any, str]] = {
    "train": (TrainConfig, "elastic.TrainConfig"),
    "scaling": (ScalingConfig | None, "elastic.ScalingConfig"),
    "checkpoint": (CheckpointConfig | None, "elastic.CheckpointConfig"),
    "health": (HealthConfig | None, "elastic.HealthConfig"),
    "faults": (tuple | list, "what elastic.parse_faults returns"),
    "callbacks": (tuple | list, "a tuple of elastic.Callback instances"),
}

_ELEMENTS = {"faults": Fault, "callbacks": Callback}

_UNUSED = {
    "storage_filesystem": "Use a storage_path that is mounted, and checkpoint="
    "CheckpointConfig(store=...) for checkpoints on S3",
    "failure_config": "Failures are governed by health=HealthConfig(...)",
    "checkpoint_config": "Checkpoints are governed by checkpoint=elastic.CheckpointConfig(...)",
    "callbacks": "Give ElasticTrainer(callbacks=...) a tuple of elastic.Callback instances",
}

_NAME_OF_RAY = "ray_train_run-"
"""With which a name begins that Ray Train gives, after the time."""

_MOST_NAME_BYTES = 200
"""Of 255 that a file system takes: the lock and a run that is set aside have longer names."""


def check_arguments(**arguments: Any) -> None:
    """Raises ConfigError for an argument of another type, settings without a task, and a field of
    `run_config` that is set, but would be ignored."""
    from ray.train import RunConfig

    kinds = {**_WANTED, "run_config": (RunConfig | None, "ray.train.RunConfig")}
    for name, value in arguments.items():
        kind, wanted = kinds[name]
        if not isinstance(value, kind):
            raise _wrong_argument(name, value, wanted)
    for name, kind in _ELEMENTS.items():
        for element in arguments[name]:
            if not isinstance(element, kind):
                raise _wrong_argument(name, element, _WANTED[name][1])
    if arguments["train"].task is None:  # a job's settings have none
        raise ConfigError(
            "train.task", None, "there is nothing to learn", "Use CausalLM(...) or CustomTask(...)"
        )
    if arguments["run_config"] is not None:
        _check_unused(arguments["run_config"])
        _check_name(arguments["run_config"].name)


def warn_of_no_name(run_config: RunConfig) -> None:
    """Warns where Ray Train has named the run: each start has a name of its own then."""
    if str(run_config.name).startswith(_NAME_OF_RAY):
        log.warning(
            "run_config has no name, so this run is %r: the same command will not continue it, nor "
            "attach to it, but begin another one. Use RunConfig(name=...)",
            run_config.name,
        )


def _wrong_argument(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(name, value, f"of type {type_name(value)}, not {wanted}", f"Use {wanted}")


def _check_unused(run_config: RunConfig) -> None:
    default = type(run_config)()
    for field, fix in _UNUSED.items():
        value = getattr(run_config, field)
        if value != getattr(default, field):
            raise ConfigError(f"run_config.{field}", value, "it would be ignored", fix)


def _check_name(name: Any) -> None:
    """The run's directory, its lock and its place in a store are named after it."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or "/" in name
        or name.startswith(".")
        or len(name.encode()) > _MOST_NAME_BYTES
    ):
        raise ConfigError(
            "run_config.name",
            name,
            "not one segment of a path",
            f"Use up to {_MOST_NAME_BYTES} bytes of text without / and line breaks, and with no "
            f". in front",
        )
