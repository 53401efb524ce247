"""How much of the copying between a GPU and its host is hidden behind computation, by a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trainer.loop.device_time import Span, merge, on_device, span_of


def hidden_share(events: Iterable[Any]) -> float | None:
    """Share of the time of copies from and to pinned memory in which a kernel ran, too; None where
    there was no such copy.

    Args:
        events: of `torch.profiler`, from the device and others: `profile.events()`.
    """
    here = on_device(events)
    copies = [span_of(e) for e in here if e.name.startswith("Memcpy") and "Pinned" in e.name]
    kernels = merge(span_of(e) for e in here if not e.name.startswith("Mem"))
    total = sum(end - begin for begin, end in copies)
    return sum(overlap(copy, kernels) for copy in copies) / total if total else None


def overlap(span: Span, merged: Sequence[Span]) -> float:
    """How much of a span lies in others, which do not touch."""
    begin, end = span
    return sum(max(0.0, min(end, right) - max(begin, left)) for left, right in merged)
