"""Whether a store can decide between two who commit."""

from __future__ import annotations

from checkpointing.stores.protocols import Store


def first_write_wins(store: Store, key: str) -> bool:
    """Whether of two conditional writes of a free `key` the first succeeds, and it alone. Leaves
    the object there."""
    first = store.put_if_absent(key, b"first")
    second = store.put_if_absent(key, b"second")
    return first and not second and store.get(key) == b"first"
