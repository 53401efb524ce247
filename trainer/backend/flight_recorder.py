"""Torch's flight recorder: the collectives that this process has begun."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d


def read_flight_recorder() -> bytes:
    """What is recorded, as one line of JSON. Called from any thread; it waits for no collective."""
    c10d: Any = _distributed_c10d
    recorded: bytes = c10d._dump_fr_trace_json(True, False)
    return recorded
