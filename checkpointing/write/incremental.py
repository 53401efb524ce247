"""Parts that are as they were in the checkpoint before are not written again.

    write_changed
      ├─ _look           a sample of each part, and where that is as it was, or the part is frozen,
      │                  all of it, against what is known of the newest committed checkpoint
      ├─ write_parts     what differs; what seems to stand still, in segments of its own
      └─ the receipt     names what was written, and the earlier segments of the rest

A part that changes costs the hash of its sample. One that stands still is hashed, 2 GiB/s on a core
of 2026, and neither read by CRC nor written. What is known is the writer's own memory: after a loss
of it everything is written once more. `commit` refuses segments that the newest checkpoint lacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from checkpointing.format.boxes import Box, TensorSlice
from checkpointing.format.layout import BLOCK_BYTES, PIECE_BYTES, SEGMENT_BYTES, Keys
from checkpointing.format.manifest import Receipt, Segment
from checkpointing.format.slices import SavedSlice, SliceTable
from checkpointing.stores import Store
from checkpointing.write.byte_writer import Attempt, cut_shared, unchecked, write_parts
from checkpointing.write.publish import stored_size

_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True, kw_only=True)
class KnownPart:
    """A part as an earlier save found it."""

    sample: bytes
    """SHA-256 of some of its bytes."""
    digest: bytes | None
    """SHA-256 of all of them; None: it was seen to change, and was not hashed."""
    place: SavedSlice
    """Where it lies."""
    segment: Segment
    """In what."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """One writer's part of a save."""

    receipt: Receipt
    """For whoever commits."""
    parts: Mapping[TensorSlice, KnownPart]
    """For the writer's own next save, once this one is committed."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    sample: bytes
    digest: bytes | None
    same: KnownPart | None
    """The part in the store that it equals."""


def write_changed(
    store: Store,
    keys: Keys,
    attempt: Attempt,
    slices: Sequence[TensorSlice],
    memory: memoryview,
    *,
    known: Mapping[TensorSlice, KnownPart],
    still: Collection[str],
    segment_bytes: int = SEGMENT_BYTES,
    block_bytes: int = BLOCK_BYTES,
    piece_bytes: int | None = PIECE_BYTES,
    check: Callable[[], None] = unchecked,
) -> Written:
    """As `write_shared`, but for what lies in the store already. With the same arguments it writes
    the same bytes under the same keys, so it may be repeated.

    Args:
        store: where to.
        keys: names in the store.
        attempt: who writes what.
        slices: parts of tensors, placed in `memory` as `plan_places` has it.
        memory: must not change until this returns.
        known: `Written.parts` of the newest committed checkpoint; nothing where that is not sure.
        still: names of tensors that are not trained: they are expected not to change.
        segment_bytes: bound on the tensor bytes in one segment; a larger slice is cut.
        block_bytes: bytes of a segment under one CRC32 of the manifest.
        piece_bytes: see `write_shared`.
        check: see there.

    Raises:
        SliceError: a tensor is declared in two ways, or `memory` is too short.
        StoreError: from the store.
    """
    tensors, parts = cut_shared(slices, memory, segment_bytes)
    looks = {part: _look(read(), known.get(part), part.name in still) for part, read in parts}
    there = _present(store, [look.same.segment for look in looks.values() if look.same])
    kept = {p: x.same for p, x in looks.items() if x.same and x.same.segment.key in there}
    receipt = write_parts(
        store,
        keys,
        attempt,
        tensors,
        [(part, read) for part, read in parts if part not in kept],
        apart={part for part, look in looks.items() if look.digest is not None},
        segment_bytes=segment_bytes,
        block_bytes=block_bytes,
        piece_bytes=piece_bytes,
        check=check,
    )
    earlier = {one.segment.key: one.segment for one in kept.values()}
    segments = (*receipt.segments, *earlier.values())
    places = (*receipt.slices, *(one.place for one in kept.values()))
    whole = replace(
        receipt,
        slices=SliceTable.of(places, tensors, [segment.key for segment in segments]),
        segments=segments,
    )
    return Written(receipt=whole, parts={**_known_now(receipt, looks, kept), **kept})


def _look(data: memoryview, old: KnownPart | None, still: bool) -> _Look:
    sample = _sample(data)
    alike = old is not None and old.sample == sample
    digest = hashlib.sha256(data).digest() if still or alike else None
    same = old if alike and old is not None and old.digest == digest else None
    return _Look(sample=sample, digest=digest, same=same)


def _sample(data: memoryview) -> bytes:
    """Of a few pieces all over the part: rows of an embedding may wait long for their token."""
    found = hashlib.sha256()
    for start in range(0, len(data), max(len(data) // _SAMPLES, _SAMPLE_BYTES)):
        found.update(data[start : start + _SAMPLE_BYTES])
    return found.digest()


def _present(store: Store, segments: Sequence[Segment]) -> set[str]:
    """The keys of those that are in the store as a whole: somebody may have deleted them."""
    found = {segment.key: segment.size_bytes for segment in segments}
    return {key for key, size_bytes in found.items() if stored_size(store, key) == size_bytes}


def _known_now(
    receipt: Receipt, looks: Mapping[TensorSlice, _Look], kept: Collection[TensorSlice]
) -> dict[TensorSlice, KnownPart]:
    segments = {segment.key: segment for segment in receipt.segments}
    places = {Box(one.name, one.offsets, one.sizes): one for one in receipt.slices}
    return {
        part: KnownPart(
            sample=look.sample,
            digest=look.digest,
            place=places[part.box],
            segment=segments[places[part.box].segment],
        )
        for part, look in looks.items()
        if part not in kept
    }
