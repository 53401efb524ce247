"""From sample ids to a batch of tensors: what the training loop asks its data for.

A `SampleSource` answers one question: give me the batch of these ids. Which ids is `order.py`'s
business. `TokenDataset` is ours, over a token set; `MapDataset` makes a source out of any map-style
dataset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from trainer.data.order import Ids
from trainer.data.token_batch import TokenBatch
from trainer.data.tokens import open_once
from trainer.errors import ConfigError


class SampleSource(Protocol):
    """Anything that training draws samples from; one id must always give the same sample."""

    def __len__(self) -> int:
        """Count the samples of an epoch."""
        ...

    def batch(self, ids: Ids) -> object:
        """Return the samples `ids`, in this order, as one batch on the CPU."""
        ...


class TokenDataset:
    """Windows of `seq_len + 1` tokens with stride `seq_len` over a token set.

    Neighbours share one token, so that each token but the first is a target exactly once; the
    windows together score the targets `1 .. len(dataset) * seq_len`.

    Args:
        path: directory of the token set.
        seq_len: inputs per sample, in tokens.

    Raises:
        ConfigError: the set is too short for one window.
        TokensCorruptError: the set fails its size check.
    """

    def __init__(self, path: str | Path, seq_len: int) -> None:
        self.tokens = open_once(str(path))
        self.seq_len = seq_len
        if len(self) < 1:
            raise ConfigError(
                "train.task.data.paths",
                str(path),
                f"{len(self.tokens)} tokens found, {seq_len + 1} needed for one sample",
                "Use a shorter train.task.seq_len or more text",
            )

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def batch(self, ids: Ids) -> Any:
        """Read the windows `ids`.

        Shapes: returns int64 (len(ids), seq_len + 1) on the CPU.

        Raises:
            IndexError: an id is not in [0, len(self)).
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self):
            raise IndexError(f"ids {ids.min()}..{ids.max()} of a dataset of {len(self)}")
        windows = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, number in enumerate(ids):
            windows[row] = self.tokens.read(int(number) * self.seq_len, self.seq_len + 1)
        return torch.from_numpy(windows)


class TextDataset(TokenDataset):
    """The same windows, with word of where their texts begin: positions count from there.

    The last token of a text still has the first one of the next as its target: what a sample counts
    does not depend on its texts.

    Args:
        path: directory of the token set.
        seq_len: inputs per sample, in tokens.
        end_id: the token that ends each text.
    """

    def __init__(self, path: str | Path, seq_len: int, end_id: int) -> None:
        super().__init__(path, seq_len)
        self._end_id = end_id

    def batch(self, ids: Ids) -> TokenBatch:
        """See TokenDataset."""
        whole = TokenBatch.of(super().batch(ids))
        starts = [
            np.append(0, 1 + np.flatnonzero(row[:-1] == self._end_id))
            for row in whole.inputs.numpy()
        ]
        places = np.arange(self.seq_len)
        positions = [
            places - np.repeat(begin, np.diff(begin, append=self.seq_len)) for begin in starts
        ]
        return whole._replace(positions=torch.from_numpy(np.stack(positions)), documents=starts)


class MapStyle(Protocol):
    """The map-style dataset of PyTorch: a length and items by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MapDataset:
    """A `SampleSource` over any map-style dataset, with PyTorch's default collation."""

    def __init__(self, dataset: MapStyle) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, ids: Ids) -> object:
        """Collate the items `ids`, in this order."""
        return default_collate([self.dataset[int(number)] for number in ids])
