"""Torch's flight recorder: the collectives that this process has begun."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d

from trainer.backend.groups import Device


def read_flight_recorder(device: Device) -> bytes:
    """What is recorded, as one line of JSON. Called from any thread; it waits for no collective.

    Args:
        device: where the tensors of this process's groups are. Torch keeps one recording for NCCL,
            whose entries refer to events of CUDA, and one for all other backends.
    """
    c10d: Any = _distributed_c10d
    dump = c10d._dump_nccl_trace_json if device == "cuda" else c10d._dump_fr_trace_json
    recorded: bytes = dump(True, False)
    return recorded
