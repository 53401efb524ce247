"""A task's model and the form of its samples, without its data."""

from __future__ import annotations

import atexit
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trainer.config import TrainConfig
from trainer.data import SampleSource
from trainer.data.order import Ids
from trainer.data.token_batch import TokenBatch
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
        return self._tokens()

    def eval_data(self) -> SampleSource | None:
        """See PreparedTask."""
        return self._tokens() if self.holds_out else None

    def _tokens(self) -> _Tokens:
        return _Tokens(self.seq_len, apart=self.end_id is not None)


class _Tokens:
    """Samples of no content, each one text.

    Args:
        seq_len: inputs per sample, in tokens.
        apart: they come with word of where their texts begin, as a `TextDataset`'s.
    """

    def __init__(self, seq_len: int, *, apart: bool) -> None:
        self._seq_len, self._apart = seq_len, apart

    def __len__(self) -> int:
        return 1 << 20

    def batch(self, ids: Ids) -> torch.Tensor | TokenBatch:
        windows = torch.zeros(len(ids), self._seq_len + 1, dtype=torch.int64)
        if not self._apart:
            return windows
        positions = torch.arange(self._seq_len).repeat(len(ids), 1)
        starts = [np.zeros(1, np.int64)] * len(ids)
        return TokenBatch.of(windows)._replace(positions=positions, documents=starts)
