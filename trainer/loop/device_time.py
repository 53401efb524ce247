"""What a profiler saw on a GPU: how long it worked, and how long collectives had nothing beside
them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType

Span = tuple[float, float]
"""Begin and end, in one unit."""

_COLLECTIVE = re.compile(r"nccl", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Of all streams together: what runs beside each other counts once."""

    busy_ms: float
    """In which anything ran."""
    collectives_ms: float
    """In which a collective of NCCL's did, inside the replica or across."""
    exposed_ms: float
    """In which nothing else did beside it, no copy either. Waiting for a slower worker counts."""


def device_time(events: Iterable[Any]) -> DeviceTime | None:
    """Where a GPU's time went; None where nothing ran on one.

    Args:
        events: of `torch.profiler`, from the device and others: `profile.events()`.
    """
    here = on_device(events)
    collectives = [span_of(e) for e in here if _COLLECTIVE.search(e.name)]
    others = [span_of(e) for e in here if not _COLLECTIVE.search(e.name)]
    if not here:
        return None
    busy, without = _length_ms([*collectives, *others]), _length_ms(others)
    return DeviceTime(
        busy_ms=busy, collectives_ms=_length_ms(collectives), exposed_ms=busy - without
    )


def on_device(events: Iterable[Any]) -> list[Any]:
    """Kernels, copies and fills."""
    return [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def span_of(event: Any) -> Span:
    """When it ran, in microseconds."""
    return event.time_range.start, event.time_range.end


def merge(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not touch, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _length_ms(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in merge(spans)) / 1e3
