"""What process groups leave behind in the coordinator's store: their members' addresses, under a
prefix that is used once. Kept for ever, they would fill its memory."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Past:
    """Which groups nobody makes any more."""

    generation: int
    """Those across replicas, of heals and of tests of connections that are older."""
    begun: int
    """Those of the replicas that ever began to form,"""
    present: Set[int]
    """but for these."""

    def __contains__(self, key: str) -> bool:
        """Whether the key is of such a group."""
        kind, number, *_ = [*key.split("/", 2), ""]
        if not number.isdecimal():
            return False
        if kind == "replica":
            return int(number) <= self.begun and int(number) not in self.present
        return kind in ("cross", "heal", "links") and int(number) < self.generation


def sweep_store(store: Any, past: Past) -> int:
    """Deletes them, which takes a round trip for each: for a thread of its own.

    Args:
        store: a TCPStore.
        past: whose keys may go.

    Returns:
        How many keys were deleted.
    """
    stale = [key for key in store.list_keys() if key in past]
    for key in stale:
        store.delete_key(key)
    return len(stale)
