"""The note that a checkpoint was read and checked, byte by byte, and found good.

It names the commit record that it is about, so that a later checkpoint of the same step does not
inherit it.
"""

from __future__ import annotations

import json
import time

from checkpointing.errors import CorruptError, MissingError
from checkpointing.format.layout import Keys
from checkpointing.format.manifest import Manifest
from checkpointing.stores import Store


def note_verified(store: Store, keys: Keys, manifest: Manifest) -> None:
    """Writes the note that every byte of `manifest`'s checkpoint is as it was written."""
    body = {"manifest_sha256": manifest.sha256, "verified_at": time.time()}
    store.put(keys.verified(manifest.step), [json.dumps(body).encode()])


def forget_verified(store: Store, keys: Keys, step: int) -> None:
    """Takes the note back; none is fine."""
    store.delete(keys.verified(step))


def verified_at(store: Store, keys: Keys, step: int, sha256: str) -> float | None:
    """When the checkpoint of `step`, whose record has `sha256`, was last found good, in seconds
    since 1970; None: not yet."""
    try:
        body = json.loads(store.get(keys.verified(step)))
        if body["manifest_sha256"] != sha256:
            return None
        return float(body["verified_at"])
    except (MissingError, CorruptError, ValueError, TypeError, KeyError, RecursionError):
        return None  # absent, half gone or of another form: then it says nothing
