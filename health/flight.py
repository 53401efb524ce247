"""What torch's flight recorder tells: the collectives that a worker has begun, and which of them
have not ended. Pure.

What is recorded was looked at on torch 2.13 (`docs/health.md`): every group, on NCCL and on Gloo,
also those made by hand, which have no name. On Gloo an entry's `state` stays "scheduled", and
`retired` says whether it has ended.
"""

from __future__ import annotations

import json
from typing import Any

LATEST = 200
"""Entries that are kept: dozens of steps of a small model, layers of a large one."""

NO_NAME = "across replicas"
"""The only groups that we make by hand."""


def latest_of(trace: str) -> str:
    """A recording with its `LATEST` entries only; what is no recording as it is."""
    try:
        whole: dict[str, Any] = json.loads(trace)
    except ValueError:
        return trace
    return json.dumps({**whole, "entries": whole.get("entries", [])[-LATEST:]})


def find_pending(trace: str) -> list[dict[str, Any]]:
    """The collectives of a recording that have not ended, the oldest first: `group`, `what`, its
    `number` in the group, and the `sizes` that went in."""
    try:
        entries: list[dict[str, Any]] = json.loads(trace)["entries"]
    except (ValueError, KeyError, TypeError):
        return []
    return [
        {
            "group": " ".join(filter(None, one["process_group"])) or NO_NAME,
            "what": one["profiling_name"],
            "number": one["p2p_seq_id"] if one["is_p2p"] else one["collective_seq_id"],
            "sizes": one["input_sizes"],
        }
        for one in entries
        if not one["retired"] and one["state"] != "completed"
    ]
