"""A task's model and the form of its samples, without its data."""

from __future__ import annotations

import atexit
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainer.config import TrainConfig
from trainer.data import SampleSource
from trainer.data.order import Ids
from trainer.tasks.causal_lm import CausalLM, PreparedCausalLM
from trainer.tasks.task import PreparedTask


def prepare_shape(train: TrainConfig) -> PreparedTask:
    """The task of a run as its workers get it. Of text nothing is read; another task than
    `CausalLM` is prepared as for a run; what it keeps is there until the process ends.

    Raises:
        ConfigError: the task cannot work.
    """
    task: Any = train.task
    if isinstance(task, CausalLM):
        vocabulary = _vocabulary(task)
        task.check(vocabulary)
        shape = _Shape.without_text(train, vocabulary)
        return replace(shape, holds_out=task.data.holdout > 0)
    cache = tempfile.TemporaryDirectory()
    atexit.register(cache.cleanup)
    prepared: PreparedTask = task.prepare(train, cache.name)
    return prepared


def _vocabulary(task: CausalLM) -> int:
    """Tokens that the data uses, at most. 0 where the model says how many it has: the tokenizer
    may be elsewhere, on the cluster."""
    says = task.model.path is not None or task.model.settings.get("vocab_size") is not None
    return 0 if says and task.data.tokenizer is not None else task.vocab_size()


@dataclass(frozen=True, kw_only=True)
class _Shape(PreparedCausalLM):
    """A causal language model without text."""

    holds_out: bool = False
    """Whether the text would have a held-out part."""

    def train_data(self) -> SampleSource:
        """See PreparedTask."""
        return _Tokens(self.seq_len)

    def eval_data(self) -> SampleSource | None:
        """See PreparedTask."""
        return _Tokens(self.seq_len) if self.holds_out else None


class _Tokens:
    """Samples of no content."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len

    def __len__(self) -> int:
        return 1 << 20

    def batch(self, ids: Ids) -> torch.Tensor:
        return torch.zeros(len(ids), self._seq_len + 1, dtype=torch.int64)
