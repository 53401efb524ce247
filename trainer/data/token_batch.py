"""Tokens on their way into a language model: a micro-batch, or what one worker has of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Starts = NDArray[np.int64]


class TokenBatch(NamedTuple):
    """Tokens, and what is to be said of each.

    Shapes: tensors are int64, (samples, tokens).
    """

    inputs: torch.Tensor
    """What the model reads."""
    targets: torch.Tensor
    """The token after each of them."""
    positions: torch.Tensor | None = None
    """Places in their text; (1, tokens) where they are the same in all samples; None: 0, 1, 2, …"""
    documents: Sequence[Starts] | None = None
    """Where the texts of each sample begin, 0 first, counted in the whole sample; on the host.
    None: each sample is one text."""

    @classmethod
    def of(cls, windows: torch.Tensor) -> TokenBatch:
        """Of windows (samples, tokens + 1), each for one text."""
        return cls(windows[:, :-1], windows[:, 1:])

    def select(self, stretches: Sequence[tuple[int, int]]) -> TokenBatch:
        """The tokens of these stretches, (start, end), one after the other."""
        tokens, device = self.inputs.shape[1], self.inputs.device
        positions = self.positions
        if positions is None:
            positions = torch.arange(tokens, device=device).unsqueeze(0)
        inputs, targets, positions = (
            torch.cat([tensor[:, start:end] for start, end in stretches], dim=1)
            for tensor in (self.inputs, self.targets, positions)
        )
        return TokenBatch(inputs, targets, positions, self.documents)
