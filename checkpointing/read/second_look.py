"""What one reader found wrong is looked at from another machine, before anything is given up."""

from __future__ import annotations

import errno
from typing import Literal

from checkpointing.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    SliceError,
    StoreError,
    StoreUnavailableError,
)
from checkpointing.format.layout import Keys
from checkpointing.format.manifest import Manifest, Segment
from checkpointing.format.segment import check_table
from checkpointing.read.catalogue import load_manifest
from checkpointing.read.checked_source import CheckedSource, block_checks
from checkpointing.stores import Store

Fault = Literal["checkpoint", "store", "reader"]
"""The checkpoint is damaged, the store cannot be reached, or it is the machine that read."""

_CHUNK_BLOCKS = 4


def is_damage(error: CheckpointError) -> bool:
    """Whether a checkpoint that cannot be read is at fault, rather than the way to it."""
    return not isinstance(error, StoreUnavailableError) or error.errno == errno.EIO


def decide_fault(told: CheckpointError, seen: CheckpointError | None) -> Fault:
    """Whose fault it is that a checkpoint cannot be read.

    Args:
        told: what a reader says.
        seen: what `look_again` raised on another machine; None: all reads well there.
    """
    if not is_damage(told):
        # What is wrong here then, as a mount that is missing, no reader has confirmed.
        return "reader" if seen is None else "store"
    if seen is not None:
        return "checkpoint" if is_damage(seen) else "store"
    # Those are about what a sound record says, which is the same on every machine.
    return "checkpoint" if isinstance(told, IncompatibleError | SliceError) else "reader"


def look_again(store: Store, keys: Keys, step: int, told: CheckpointError) -> Manifest:
    """Reads the record of `step`, and of its segments what `told` names: the bytes, or all.

    Returns:
        The record, where all that is as it was written.

    Raises:
        CheckpointError: what is wrong, as seen from here.
    """
    manifest = load_manifest(store, keys, step)
    where, bad = _named(told)
    segment = next((s for s in manifest.segments.values() if where.endswith(s.key)), None)
    if segment is not None:
        _check(store, segment, bad or (0, segment.size_bytes))
    return manifest


def _named(told: CheckpointError) -> tuple[str, tuple[int, int] | None]:
    """The key, path or URL that an error names, and the bytes there."""
    if isinstance(told, CorruptError):
        return told.key, told.byte_range
    return (told.where if isinstance(told, StoreError) else ""), None


def _check(store: Store, segment: Segment, bad: tuple[int, int]) -> None:
    size = store.size(segment.key)
    if size != segment.size_bytes:
        fact = f"it has {size} bytes; {segment.size_bytes} were written"
        raise CorruptError(segment.key, fact)
    source, checks = CheckedSource(store), block_checks(segment)
    if segment.table is not None:
        check_table(source.read_table(segment, segment.table), segment, segment.table)
    block, end = segment.block_bytes, min(bad[1], segment.checked_bytes)
    for start in range(bad[0] // block * block, end, _CHUNK_BLOCKS * block):
        behind = -(-min(start + _CHUNK_BLOCKS * block, end) // block) * block
        source.read(checks, start, min(behind, segment.checked_bytes))
