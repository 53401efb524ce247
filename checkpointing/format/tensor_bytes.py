"""A tensor's elements as the bytes that they are."""

from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The row-major bytes of a CPU tensor: its own memory where contiguous, else of a copy."""
    dense = tensor.detach().contiguous()
    # Not reshape(-1): of a tensor with one element it may keep a stride that view() refuses.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
