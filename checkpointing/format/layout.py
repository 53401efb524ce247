"""The names of everything in a checkpoint store, as one object, and its fixed sizes.

    {prefix}/d/{hh}/r{rank:05}/{step:012}-{generation}-{attempt}/{segment:05}.safetensors
    {prefix}/m/{step:012}.json
    {prefix}/m/{step:012}.claim        whoever decides the checkpoint's fate (claims.py)
    {prefix}/m/{step:012}.verified     that every byte of it was read and checked (verified_mark.py)
    {prefix}/m/{step:012}.json.ENDING  a record that was set aside (catalogue.py)

`hh` is two hex digits of a hash of the rank. It stands before the step because S3 scales by key
prefix: entropy first spreads the ranks, and the same prefixes stay warm from save to save. A store
that is rooted in the run's own directory uses an empty prefix.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

BLOCK_BYTES = 4 << 20
"""Bytes of a segment under one CRC32 of the manifest."""

PIECE_BYTES = 16 << 10
"""Bytes of a segment under one CRC32 of the table at its end; divides `BLOCK_BYTES`."""

SEGMENT_BYTES = 512 << 20
"""Default bound on the tensor bytes in one segment."""

CRC_BYTES = 4
"""Bytes of one CRC32 in a segment's table: a little-endian uint32."""

_STEP_IN_KEY = re.compile(
    r"(?:d/[0-9a-f]{2}/r\d{5,}/(?P<data>\d{12,})-|m/(?P<record>\d{12,})\.(?:json|claim|verified))"
)
_RANK_IN_KEY = re.compile(r"/d/[0-9a-f]{2}/r(\d{5,})/")

_SEGMENT = re.compile(r"d/[0-9a-f]{2}/r\d{5,}/(?P<step>\d{12,})-\d+-\d+/\d{5,}\.safetensors")
_WRITER_IN_KEY = re.compile(r"d/[0-9a-f]{2}/r\d{5,}/\d{12,}-(?P<generation>\d+)-\d+/")


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Makes and takes apart the keys of one run."""

    prefix: str = ""
    """`{base}/{run}` without a slash at the end, or empty."""

    @property
    def root(self) -> str:
        """What every key of the run begins with."""
        return f"{self.prefix}/" if self.prefix else ""

    @property
    def commits(self) -> str:
        """What every commit record's key begins with."""
        return f"{self.root}m/"

    @property
    def data(self) -> str:
        """What every segment's key begins with."""
        return f"{self.root}d/"

    def commit(self, step: int) -> str:
        """Key of the commit record of `step`."""
        return f"{self.commits}{step:012}.json"

    def claim(self, step: int) -> str:
        """Key of what pins the checkpoint of `step`, or says that it is being deleted."""
        return f"{self.commits}{step:012}.claim"

    def verified(self, step: int) -> str:
        """Key of the note that the checkpoint of `step` has been verified."""
        return f"{self.commits}{step:012}.verified"

    def segment(self, *, rank: int, step: int, generation: int, attempt: int, index: int) -> str:
        """Key of a writer's segment number `index`."""
        return f"{self.attempt(rank, step, generation, attempt)}{index:05}.safetensors"

    def attempt(self, rank: int, step: int, generation: int, attempt: int) -> str:
        """What the keys of all segments begin with that a writer writes for one attempt."""
        spread = hashlib.sha256(str(rank).encode()).hexdigest()[:2]
        return f"{self.data}{spread}/r{rank:05}/{step:012}-{generation}-{attempt}/"

    def is_segment(self, key: str, *, up_to_step: int) -> bool:
        """Whether a key is that of a segment of this run, written at `up_to_step` or before."""
        found = _SEGMENT.fullmatch(key, len(self.root)) if key.startswith(self.root) else None
        return found is not None and int(found["step"]) <= up_to_step

    def generation_of(self, key: str) -> int | None:
        """The generation that wrote a segment; None for every other key."""
        found = _WRITER_IN_KEY.match(key, len(self.root)) if key.startswith(self.root) else None
        return int(found["generation"]) if found else None

    def step_of(self, key: str) -> int | None:
        """The step a key belongs to, leftovers of a killed writer included; None if foreign."""
        if not key.startswith(self.root):
            return None
        found = _STEP_IN_KEY.match(key, len(self.root))
        return int(found["data"] or found["record"]) if found else None


def table_bytes(begin: int, piece_bytes: int) -> int:
    """Bytes of the table of a segment that has `begin` bytes before it."""
    return CRC_BYTES * -(-begin // piece_bytes)


def rank_of(where: str) -> int | None:
    """The rank whose segment a key or URL names; None for everything else."""
    found = _RANK_IN_KEY.search(f"/{where}")
    return int(found[1]) if found else None
