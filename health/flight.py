"""What torch's flight recorder tells: the collectives that a worker has begun, and which of them
have not ended. Pure.

What is recorded was looked at on torch 2.13 (`docs/run-directory.md`): every group on Gloo, also
those made by hand. There an entry's `state` stays "scheduled", and `retired` says whether it has
ended. Of NCCL's groups both tell, but for each send and receive of a batch.
"""

from __future__ import annotations

import json
from typing import Any

LATEST = 200
"""Entries that are kept: dozens of steps of a small model, layers of a large one."""

NO_NAME = "without a name"
"""Groups that others have made by hand: ours are named."""

_Entry = dict[str, Any]


def latest_of(trace: str) -> str:
    """A recording with its `LATEST` entries, and the last of every group before these: how far a
    worker is in a group that it seldom uses. What is no recording as it is."""
    entries = entries_of(trace)
    if not entries:
        return trace
    latest = entries[-LATEST:]
    used = {one["pg_id"] for one in latest}
    last = {one["pg_id"]: one for one in entries if one["pg_id"] not in used}
    return json.dumps({**json.loads(trace), "entries": [*last.values(), *latest]})


def entries_of(trace: str) -> list[_Entry]:
    """What a recording holds, the oldest first; nothing of what is no recording."""
    try:
        entries: list[_Entry] = json.loads(trace)["entries"]
    except (ValueError, KeyError, TypeError):
        return []
    return entries


def number_of(entry: _Entry) -> int:
    """Its number among the collectives, or the sends and receives, of its group."""
    number: int = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return number


def has_ended(entry: _Entry) -> bool:
    """Whether the worker waits in it no more."""
    return bool(entry["retired"]) or entry["state"] == "completed"


def _is_of_batch(entry: _Entry) -> bool:
    """Of one send or receive of a batch NCCL's recorder never learns the end: only of the batch."""
    return entry["is_p2p"] and not entry["profiling_name"].endswith("coalesced")


def find_pending(trace: str) -> list[dict[str, Any]]:
    """The collectives of a recording that have not ended, the oldest first: `group`,
    `what`, its `number` in the group, and the `sizes` that went in."""
    return [
        {
            "group": " ".join(filter(None, one["process_group"])) or NO_NAME,
            "what": one["profiling_name"],
            "number": number_of(one),
            "sizes": one["input_sizes"],
        }
        for one in entries_of(trace)
        if not has_ended(one) and not _is_of_batch(one)
    ]
