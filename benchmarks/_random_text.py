"""A language model on random text, for what does not depend on what a text says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import TrainConfig
from trainer.tasks.causal_lm import PreparedCausalLM

_SAMPLES = 1 << 16


class RandomText:
    """Samples of random tokens, the same for the same ids."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        self._seq_len, self._vocab_size = seq_len, vocab_size

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, sample: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sample)
        return torch.randint(self._vocab_size, (self._seq_len + 1,), generator=generator)

    def batch(self, ids: Any) -> torch.Tensor:
        """See SampleSource."""
        return torch.stack([self[int(sample)] for sample in ids])


@dataclass(frozen=True, kw_only=True)
class RandomLM(PreparedCausalLM):
    """A language model on random text. Implements PreparedTask."""

    def train_data(self) -> RandomText:
        """See PreparedTask."""
        return RandomText(self.seq_len, self.config["vocab_size"])

    def eval_data(self) -> None:
        """See PreparedTask."""
        return None


def prepared(train: TrainConfig) -> RandomLM:
    """The task of a run as its workers get it."""
    return RandomLM.without_text(train, 0)
