"""What process groups leave behind in the coordinator's store: their members' addresses, under a
prefix that is used once. Kept for ever, they would fill its memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def find_stale_keys(keys: Iterable[str], *, generation: int, formation: int) -> list[str]:
    """Keys of groups that nobody makes any more.

    Args:
        keys: all keys of the store.
        generation: the oldest one whose groups may still be made.
        formation: of the oldest replica whose group may still be made.
    """
    oldest = {
        "cross": generation,
        "heal": generation,
        "links": generation,
        "replica": formation,
    }
    stale = []
    for key in keys:
        kind, number, *_ = [*key.split("/", 2), ""]
        if number.isdecimal() and int(number) < oldest.get(kind, 0):
            stale.append(key)
    return stale


def sweep_store(store: Any, *, generation: int, formation: int) -> int:
    """Deletes them, which takes a round trip for each: for a thread of its own.

    Args:
        store: a TCPStore.
        generation: see `find_stale_keys`.
        formation: see `find_stale_keys`.

    Returns:
        How many keys were deleted.
    """
    stale = find_stale_keys(store.list_keys(), generation=generation, formation=formation)
    for key in stale:
        store.delete_key(key)
    return len(stale)
