"""The collectives that this process has begun: torch's flight recorder, or our own numbers."""

from __future__ import annotations

import json
from typing import Any

from torch._C import _distributed_c10d

from trainer.backend.groups import Device, begun_in_each_group


def read_flight_recorder(device: Device) -> bytes:
    """What is recorded, as one line of JSON. Called from any thread; it waits for no collective.

    On CUDA torch keeps a recording of its own for NCCL, which is not read: it asks CUDA for the
    event of each entry, with the interpreter in hand. Where that blocks, this worker could neither
    beat nor hear a call. It does not while another thread waits for the device; whether it does
    behind a launch that waits for room, `tests/gpu/test_one_rank.py` is to show. So there is one
    entry for each group, in the same form: the latest collective that was begun there. Whether it
    has ended is not known (`retired`).

    Args:
        device: where the tensors of this process's groups are.
    """
    if device == "cuda":
        return json.dumps({"entries": _latest_of_each_group()}).encode()
    c10d: Any = _distributed_c10d
    recorded: bytes = c10d._dump_fr_trace_json(True, False)
    return recorded


def _latest_of_each_group() -> list[dict[str, Any]]:
    return [
        {
            "pg_id": number,
            "process_group": [begun.group, begun.description],
            "profiling_name": "nccl:collective",
            "collective_seq_id": begun.collectives,
            "is_p2p": False,
            "input_sizes": [],
            "state": "begun",
            "retired": None,
        }
        for number, begun in enumerate(begun_in_each_group())
    ]
