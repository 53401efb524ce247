"""Gradients of lanes whose sum shows the order in which it was added up, and buckets of them."""

from __future__ import annotations

import numpy as np
import torch

COUNT, ENDS, PADDING = 1003, (250, 251, 500, 1003), 8
"""Numbers in a gradient, where its buckets end, and what a flat buffer has beyond."""


def lane_gradients(total: int) -> list[torch.Tensor]:
    """Exponents 40 apart, so that almost any other order of the sum rounds differently."""
    rng = np.random.default_rng(11)
    values = rng.standard_normal((total, COUNT)) * np.exp2(rng.integers(-20, 20, (total, COUNT)))
    return [torch.tensor(row, dtype=torch.float32) for row in values]
