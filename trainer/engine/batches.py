"""Batches on their way from the data to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves a tensor, or each tensor in a list, (named) tuple or dict, to `device`."""
    return _each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(batch: Any) -> Any:
    """The same in memory that `to_device` copies from without making the host wait."""
    return _each(batch, torch.Tensor.pin_memory)


def upload(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Numbers of the host in float64 on `device`, for which the host does not wait:
    `torch.tensor(..., device="cuda")` copies from memory that is not pinned, and waits for all that
    was queued before."""
    there = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


def _each(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: _each(value, change) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_each(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
