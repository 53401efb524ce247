"""Torch's flight recorder: the collectives that this process has begun."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d

from trainer.backend.groups import Device


def read_flight_recorder(device: Device) -> bytes:
    """What is recorded, as one line of JSON. Called from any thread; it waits for no collective.

    On CUDA nothing is read. Torch keeps a recording of its own for NCCL, and asks CUDA for the
    event of each entry, with the interpreter in hand: where that blocks, as CUDA's calls may while
    another thread waits in one, this worker could neither beat nor hear a call. Whether it does,
    `tests/gpu/test_one_rank.py` is to show.

    Args:
        device: where the tensors of this process's groups are.
    """
    if device == "cuda":
        return b"{}"
    c10d: Any = _distributed_c10d
    recorded: bytes = c10d._dump_fr_trace_json(True, False)
    return recorded
