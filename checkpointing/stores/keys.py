"""What a key may be, in every store alike."""

from __future__ import annotations

from checkpointing.errors import StoreError

PROBE = "probe-"
"""What the keys of objects begin with that only show whether a store can be used."""


def check_key(key: str) -> None:
    """Raises StoreError for a key that climbs out of its store, or that not every store can have.

    Keys come from manifests too, so one must not be trusted to stay inside.
    """
    if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
        raise StoreError(key, "not a key: an empty, '.' or '..' part, or a zero byte")
