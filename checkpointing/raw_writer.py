"""Writes a rank's share of a checkpoint from plain bytes: no torch is needed.

    write_shared
      ├─ _cut             slices above the bound into parts that lie contiguous in memory
      └─ write_parts
           ├─ plan.pack        parts into segments
           └─ _write_segment   header, each part's bytes from where they lie, table of their CRCs

Nothing written here can be seen as a checkpoint until `commit` publishes a manifest that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.boxes import TensorInfo, TensorSlice
from checkpointing.dtypes import item_bytes
from checkpointing.errors import SliceError, StoreUnavailableError
from checkpointing.layout import BLOCK_BYTES, PIECE_BYTES, SEGMENT_BYTES, Keys
from checkpointing.manifest import Receipt, SavedSlice, Segment
from checkpointing.plan import pack, row_strides, split_box
from checkpointing.segment import CheckedStream, header, slice_bytes, table_bytes
from checkpointing.stores import Store

Part = tuple[TensorSlice, Callable[[], memoryview]]
"""A slice, and what gives its row-major bytes when they are due."""

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Which try at a checkpoint, by which writer."""

    rank: int
    """The writer's number, different for every writer of this attempt."""
    step: int
    """The step that the state belongs to."""
    generation: int
    """The roster that the writer works under."""
    attempt: int = 0
    """Which try at this step in this generation."""


def plan_places(slices: Sequence[TensorSlice]) -> tuple[tuple[int, ...], int]:
    """Where slices lie one behind the other in a buffer, aligned. Pure.

    Returns:
        The first byte of each, and the bytes of them all.
    """
    places, end = [], 0
    for part in slices:
        places.append(end)
        end += -(-slice_bytes(part) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(places), end


def write_shared(
    store: Store,
    keys: Keys,
    attempt: Attempt,
    slices: Sequence[TensorSlice],
    memory: memoryview,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    block_bytes: int = BLOCK_BYTES,
    piece_bytes: int | None = PIECE_BYTES,
) -> Receipt:
    """Writes slices that lie in `memory` as `plan_places` has it; durable when it returns.

    Args:
        store: where to.
        keys: names in the store.
        attempt: who writes what.
        slices: parts of tensors. Empty ones are declared but not written.
        memory: must not change until this returns.
        segment_bytes: bound on the tensor bytes in one segment; a larger slice is cut.
        block_bytes: bytes of a segment under one CRC32 of the manifest.
        piece_bytes: bytes under one CRC32 of the segment's own table, a divisor of `block_bytes`;
            None for no table, where whole blocks are cheap to read.

    Raises:
        SliceError: a tensor is declared in two ways, or `memory` is too short.
        StoreError: from the store.
    """
    places, needed = plan_places(slices)
    if len(memory) < needed:
        name = slices[-1].name
        raise SliceError(name, f"{len(memory)} bytes are shared, and the slices take {needed}")
    parts: list[Part] = []
    for part, place in zip(slices, places, strict=True):
        parts += _cut(part, memory[place : place + slice_bytes(part)], segment_bytes)
    return write_parts(
        store,
        keys,
        attempt,
        declare(slices),
        parts,
        segment_bytes=segment_bytes,
        block_bytes=block_bytes,
        piece_bytes=piece_bytes,
    )


def declare(slices: Sequence[TensorSlice]) -> dict[str, TensorInfo]:
    """The tensors that slices are parts of. Raises SliceError where two of them disagree."""
    tensors: dict[str, TensorInfo] = {}
    for part in slices:
        if tensors.setdefault(part.name, part.info) != part.info:
            raise SliceError(
                part.name, f"declared as {tensors[part.name]} and as {part.info} on one rank"
            )
    return tensors


def write_parts(
    store: Store,
    keys: Keys,
    attempt: Attempt,
    tensors: Mapping[str, TensorInfo],
    parts: Sequence[Part],
    *,
    segment_bytes: int,
    block_bytes: int,
    piece_bytes: int | None,
) -> Receipt:
    """Writes parts, none above `segment_bytes`, as segments. For arguments see `write_shared`."""
    # Falling element size keeps every tensor aligned in its file; the sort is stable.
    parts = sorted(parts, key=lambda part: -item_bytes(part[0].dtype))
    saved: list[SavedSlice] = []
    segments: list[Segment] = []
    for index, members in enumerate(pack([slice_bytes(part) for part, _ in parts], segment_bytes)):
        key = keys.segment(
            rank=attempt.rank,
            step=attempt.step,
            generation=attempt.generation,
            attempt=attempt.attempt,
            index=index,
        )
        mine = [parts[member] for member in members]
        head = header([part for part, _ in mine], piece_bytes)
        segments.append(_write_segment(store, key, head, mine, block_bytes, piece_bytes))
        saved.extend(_locate([part for part, _ in mine], key, len(head)))
    return Receipt(
        rank=attempt.rank,
        step=attempt.step,
        generation=attempt.generation,
        attempt=attempt.attempt,
        tensors=tensors,
        slices=tuple(saved),
        segments=tuple(segments),
    )


def split_slice(part: TensorSlice, max_bytes: int) -> Iterator[tuple[tuple[int, ...], TensorSlice]]:
    """Cuts a slice into parts of at most `max_bytes`, each contiguous in the slice's own memory.

    Yields:
        Offsets within the slice, and the part. Nothing for an empty slice.
    """
    if not slice_bytes(part):
        return
    size = item_bytes(part.dtype)
    for offsets, sizes in split_box(
        (0,) * len(part.sizes),
        part.sizes,
        row_strides(part.sizes, size),
        item_bytes=size,
        max_bytes=max_bytes,
        max_stride_bytes=max_bytes,
    ):
        moved = tuple(a + b for a, b in zip(part.offsets, offsets, strict=True))
        yield offsets, TensorSlice(part.name, part.global_shape, part.dtype, moved, sizes)


def _cut(part: TensorSlice, data: memoryview, max_bytes: int) -> Iterator[Part]:
    strides = row_strides(part.sizes, item_bytes(part.dtype))
    for offsets, cut in split_slice(part, max_bytes):
        begin = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
        yield cut, _given(data[begin : begin + slice_bytes(cut)])


def _given(data: memoryview) -> Callable[[], memoryview]:
    return lambda: data


def _write_segment(
    store: Store,
    key: str,
    head: bytes,
    parts: Sequence[Part],
    block_bytes: int,
    piece_bytes: int | None,
) -> Segment:
    stream = CheckedStream(_chunks(head, parts, block_bytes), block_bytes, piece_bytes)
    size = store.put(key, stream)
    wanted = len(head) + sum(slice_bytes(part) for part, _ in parts)
    wanted += 0 if piece_bytes is None else table_bytes(wanted, piece_bytes)
    if size != wanted:
        raise StoreUnavailableError(key, None, f"the store took {size} of {wanted} bytes")
    return Segment(
        key=key,
        size_bytes=size,
        block_bytes=block_bytes,
        crcs=stream.block_crcs(),
        table=stream.table,
    )


def _chunks(head: bytes, parts: Sequence[Part], chunk_bytes: int) -> Iterator[bytes | memoryview]:
    yield head
    for _, read in parts:
        data = read()
        for start in range(0, len(data), chunk_bytes):
            yield data[start : start + chunk_bytes]


def _locate(parts: Sequence[TensorSlice], key: str, begin: int) -> Iterator[SavedSlice]:
    for part in parts:
        end = begin + slice_bytes(part)
        yield SavedSlice(
            name=part.name,
            offsets=part.offsets,
            sizes=part.sizes,
            segment=key,
            begin=begin,
            end=end,
        )
        begin = end
