"""The task of a run, prepared, as it crosses to the workers."""

from __future__ import annotations

from typing import Any

from ray import cloudpickle

from elastic.ray_compat.kept import most_kept_bytes
from trainer.config import TrainConfig
from trainer.dryrun.shape import prepare_shape
from trainer.engine.build import build_model
from trainer.errors import ConfigError
from trainer.tasks.causal_lm import CausalLM, PreparedCausalLM
from trainer.tasks.task import PreparedTask

_REST_BYTES = 16 << 20
"""Room for what crosses beside the task: the settings of the run, with the user's own in them."""


def prepare_task(train: TrainConfig, cache_dir: str) -> PreparedTask:
    """See `Task.prepare`. The model of a `CausalLM` is first built as the workers will: its text
    takes hours to prepare. A task that is its own prepared one crosses as the user made it: it is
    pickled before it is tried, as a dataset may open what does not cross in its first read, and
    reads on in a thread where that takes long.

    Raises:
        ConfigError: it cannot be prepared, does not go with the run, or does not cross.
    """
    if isinstance(train.task, CausalLM):
        build_model(prepare_shape(train), train)
    given, sent, refusal = train.task, b"", None
    try:
        sent = _pickled(given)
    except ConfigError as error:
        refusal = error  # unless it leaves another one, which crosses
    prepared: PreparedTask = given.prepare(train, cache_dir)
    if prepared is not given:
        if not isinstance(prepared, PreparedCausalLM):  # whose samples are in files
            _pickled(prepared)
        return prepared
    if refusal is not None:
        raise refusal
    crossed: PreparedTask = cloudpickle.loads(sent)
    return crossed


def _pickled(task: Any) -> bytes:
    """A task as it crosses to the workers.

    Raises:
        ConfigError: it cannot be pickled, or is too large for a message.
    """
    kind = type(task).__name__
    try:
        sent: bytes = cloudpickle.dumps(task)
    except Exception as error:  # of the user's objects
        raise ConfigError(
            "train.task",
            kind,
            f"it cannot be sent to the workers: {type(error).__name__}: {error}",
            "Open files, databases and locks in the dataset's __getitem__, not before",
        ) from error
    if len(sent) > most_kept_bytes() - _REST_BYTES:
        raise ConfigError(
            "train.task",
            kind,
            f"it is {len(sent) / 1e6:,.0f} MB pickled, and crosses to the workers in one message, "
            f"of {most_kept_bytes() / 1e6:,.0f} MB at most",
            "Keep the samples in files that all nodes see, and have the dataset's __getitem__ open "
            "or map them",
        )
    return sent
