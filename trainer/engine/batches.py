"""Batches on their way from the data to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves a tensor, or each tensor in a list, (named) tuple or dict, to `device`."""
    return _each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(batch: Any) -> Any:
    """The same in memory that `to_device` copies from without making the host wait."""
    return _each(batch, torch.Tensor.pin_memory)


def _each(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: _each(value, change) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_each(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
