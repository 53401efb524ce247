"""The collectives that this process has begun, as torch's flight recorder has them."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d

from trainer.backend.groups import Device


def read_flight_recorder(device: Device) -> bytes:
    """What is recorded, as one line of JSON. Called from any thread; it waits for no collective.

    Torch keeps a recording of its own for NCCL. To read it asks CUDA for the event of each entry,
    with the interpreter in hand. That was tried on an H200 while the device was busy and another
    thread waited for it, waited for room behind a full launch queue, and gave memory back to it
    (`tests/gpu/test_one_rank.py`).

    Args:
        device: where the tensors of this process's groups are.
    """
    c10d: Any = _distributed_c10d
    dump = c10d._dump_nccl_trace_json if device == "cuda" else c10d._dump_fr_trace_json
    recorded: bytes = dump(True, False)
    return recorded
