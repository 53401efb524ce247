"""The task of a run, prepared, as it crosses to the workers."""

from __future__ import annotations

from ray import cloudpickle

from elastic.ray_compat.kept import most_kept_bytes
from trainer.config import TrainConfig
from trainer.dryrun.shape import prepare_shape
from trainer.engine.build import build_model
from trainer.errors import ConfigError
from trainer.tasks.causal_lm import CausalLM
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
    given, sent, failure = train.task, b"", None
    try:
        sent = cloudpickle.dumps(given)
    except Exception as error:  # of the user's objects
        failure = error
    prepared: PreparedTask = given.prepare(train, cache_dir)
    if prepared is not given:
        return prepared
    if failure is not None:
        raise ConfigError(
            "train.task",
            type(given).__name__,
            f"it cannot be sent to the workers: {type(failure).__name__}: {failure}",
            "Open files, databases and locks in the dataset's __getitem__, not before",
        ) from failure
    if len(sent) > most_kept_bytes() - _REST_BYTES:
        raise ConfigError(
            "train.task",
            type(given).__name__,
            f"it is {len(sent) / 1e6:,.0f} MB pickled, and crosses to the workers in one message, "
            f"of {most_kept_bytes() / 1e6:,.0f} MB at most",
            "Keep the samples in files that all nodes see, and have the dataset's __getitem__ open "
            "or map them",
        )
    crossed: PreparedTask = cloudpickle.loads(sent)
    return crossed
