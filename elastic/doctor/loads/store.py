"""Does with a store what a run does: writes in one piece and in parts, reads, lists, deletes.

python -m elastic.doctor.loads.store s3://BUCKET/PREFIX
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from checkpointing import CheckpointError, S3Config, Store, open_store, place_of

LARGE_BYTES = 40 << 20
"""More than a part of S3Config's, so it goes up in two."""
_PATIENCE_S = 20.0
_CHUNK_BYTES = 4 << 20


def try_store(store: Store, large_bytes: int = LARGE_BYTES) -> dict[str, Any]:
    """Tries what runs do, below a prefix of its own, of which nothing is left.

    Returns:
        `failed`: what does not work -> why; and bytes per second, `write` and `read`.
    """
    prefix, small, large = f"doctor-{uuid.uuid4().hex}/", b"doctor", os.urandom(large_bytes)
    one, big = f"{prefix}small", f"{prefix}large"
    tries = _Tries()
    tries.make("put", lambda: store.put(one, [small]) == len(small))
    tries.make("put in parts", lambda: store.put(big, _chunks(large)) == large_bytes)
    tries.make("put if absent", lambda: not store.put_if_absent(one, b"another"))
    if "put" not in tries.failed:
        tries.make("get", lambda: store.get(one) == small)
    if "put in parts" not in tries.failed:
        tries.make("get a range", lambda: store.get_range(big, 0, large_bytes) == large)
    written = [key for key, how in ((big, "put in parts"), (one, "put")) if how not in tries.failed]
    tries.make("list", lambda: {*written} <= {*store.list(prefix)})
    tries.make("list unfinished uploads", lambda: store.abort_unfinished(prefix) == [])
    tries.make("delete", lambda: _delete(store, [big, one]))
    return {
        "failed": tries.failed,
        "write": large_bytes / tries.took_s["put in parts"],
        "read": large_bytes / tries.took_s.get("get a range", math.inf),
    }


class _Tries:
    """What was tried."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        """What -> why."""
        self.took_s: dict[str, float] = {}

    def make(self, what: str, work: Callable[[], bool]) -> None:
        """Does it; `work` says whether all is as it should be."""
        begin_s = time.perf_counter()
        try:
            if not work():
                self.failed[what] = "it does not show what was written"
        except CheckpointError as error:
            self.failed[what] = " ".join(str(error).split())
        self.took_s[what] = time.perf_counter() - begin_s


def _chunks(data: bytes) -> Iterator[bytes]:
    return (data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES))


def _delete(store: Store, keys: Sequence[str]) -> bool:
    store.delete_many(keys)
    return True


if __name__ == "__main__":
    place = place_of(sys.argv[1])
    if isinstance(place, S3Config):
        place = replace(place, timeout_s=_PATIENCE_S, part_timeout_s=_PATIENCE_S)
    print(json.dumps({"result": try_store(open_store(place))}))
