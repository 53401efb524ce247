"""Batches on their way from the data to the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves a tensor, or each tensor in a list, (named) tuple or mapping, to `device`."""
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
    if isinstance(batch, Mapping):
        return _like(batch, {key: _each(value, change) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        values = [_each(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the type of `batch`, with what else it has, and these values: a dict, where its
    type makes none from them. As torch.utils.data's collation, which has made it."""
    try:
        if not isinstance(batch, MutableMapping):
            return type(batch)(values)  # type: ignore[call-arg]
        clone = copy.copy(batch)
        clone.update(values)
    except TypeError:
        return values
    return clone
