"""What process groups leave behind in the coordinator's store: their members' addresses, under a
prefix that is used once. Kept for ever, they would fill its memory."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any


def find_stale_keys(keys: Iterable[str], generation: int, gone: Set[int]) -> list[str]:
    """Keys of groups that nobody makes any more.

    Args:
        keys: all keys of the store.
        generation: the oldest one whose groups may still be made.
        gone: formations whose replicas are no longer there.
    """
    stale = []
    for key in keys:
        kind, number, *_ = [*key.split("/", 2), ""]
        if not number.isdecimal():
            continue
        passed = kind in ("cross", "heal", "links") and int(number) < generation
        if passed or (kind == "replica" and int(number) in gone):
            stale.append(key)
    return stale


def sweep_store(store: Any, generation: int, gone: Set[int]) -> int:
    """Deletes them, which takes a round trip for each: for a thread of its own.

    Args:
        store: a TCPStore.
        generation: see `find_stale_keys`.
        gone: see `find_stale_keys`.

    Returns:
        How many keys were deleted.
    """
    stale = find_stale_keys(store.list_keys(), generation, gone)
    for key in stale:
        store.delete_key(key)
    return len(stale)
