"""Writes a rank's share of a checkpoint from plain bytes: no torch is needed.

    write_shared
      ├─ cut_shared            slices in a buffer into parts     } planned once
      └─ write_parts           parts into segments               } (`segment_plan.py`)
           └─ _write_segment   header, each part's bytes from where they lie, table of their CRCs

Nothing written here can be seen as a checkpoint until `commit` publishes a manifest that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.errors import SliceError, StoreUnavailableError
from checkpointing.format.boxes import TensorInfo, TensorSlice
from checkpointing.format.layout import BLOCK_BYTES, PIECE_BYTES, SEGMENT_BYTES, Keys, table_bytes
from checkpointing.format.manifest import Receipt, Segment
from checkpointing.format.segment import CheckedStream, key_seed, slice_bytes
from checkpointing.format.slices import SavedSlice, SliceTable
from checkpointing.stores import Store
from checkpointing.write.segment_plan import SegmentPlan, plan_packing, plan_parts

Part = tuple[TensorSlice, Callable[[], memoryview]]
"""A slice, and what gives its row-major bytes when they are due."""


def unchecked() -> None:
    """For memory that is sure not to change."""


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
    """Tells tries at this step in this generation apart; a run draws a number at each start."""


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
    check: Callable[[], None] = unchecked,
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
        check: called when the last of a segment has been read, and before it appears; raises where
            `memory` did change, so that nothing replaces what an earlier try has written.

    Raises:
        SliceError: a tensor is declared in two ways, or `memory` is too short.
        StoreError: from the store.
    """
    return write_parts(
        store,
        keys,
        attempt,
        *cut_shared(slices, memory, segment_bytes),
        segment_bytes=segment_bytes,
        block_bytes=block_bytes,
        piece_bytes=piece_bytes,
        check=check,
    )


def cut_shared(
    slices: Sequence[TensorSlice], memory: memoryview, max_bytes: int
) -> tuple[Mapping[str, TensorInfo], list[Part]]:
    """Slices in `memory`, placed as `plan_places` has it: their tensors, and what is in them in
    parts of at most `max_bytes`.

    Raises:
        SliceError: a tensor is declared in two ways, or `memory` is too short.
    """
    plan = plan_parts(tuple(slices), max_bytes)
    if len(memory) < plan.needed_bytes:
        fact = f"{len(memory)} bytes are shared, and the slices take {plan.needed_bytes}"
        raise SliceError(slices[-1].name, fact)
    return plan.tensors, [
        (part, _given(memory[place : place + slice_bytes(part)]))
        for part, place in zip(plan.parts, plan.places, strict=True)
    ]


def write_parts(
    store: Store,
    keys: Keys,
    attempt: Attempt,
    tensors: Mapping[str, TensorInfo],
    parts: Sequence[Part],
    *,
    apart: Collection[TensorSlice] = (),
    segment_bytes: int,
    block_bytes: int,
    piece_bytes: int | None,
    check: Callable[[], None] = unchecked,
) -> Receipt:
    """Writes parts, none above `segment_bytes`, as segments, and those `apart` in segments of
    their own. For the other arguments see `write_shared`."""
    planned = plan_packing(
        tuple(part for part, _ in parts), frozenset(apart), segment_bytes, piece_bytes
    )
    saved: list[SavedSlice] = []
    segments: list[Segment] = []
    for index, plan in enumerate(planned):
        key = keys.segment(
            rank=attempt.rank,
            step=attempt.step,
            generation=attempt.generation,
            attempt=attempt.attempt,
            index=index,
        )
        mine = [parts[member] for member in plan.members]
        body = _chunks(plan.head, mine, block_bytes, check)
        segments.append(_write_segment(store, key, plan, body, block_bytes, piece_bytes))
        saved.extend(plan.places(key))
    return Receipt(
        rank=attempt.rank,
        step=attempt.step,
        generation=attempt.generation,
        attempt=attempt.attempt,
        slices=SliceTable.of(saved, tensors, [segment.key for segment in segments]),
        segments=tuple(segments),
    )


def _given(data: memoryview) -> Callable[[], memoryview]:
    return lambda: data


def _write_segment(
    store: Store,
    key: str,
    plan: SegmentPlan,
    body: Iterator[bytes | memoryview],
    block_bytes: int,
    piece_bytes: int | None,
) -> Segment:
    wanted = len(plan.head) + sum(slice_bytes(part) for part in plan.parts)
    wanted += 0 if piece_bytes is None else table_bytes(wanted, piece_bytes)
    stream = CheckedStream(body, block_bytes, piece_bytes, key_seed(key), wanted)
    size = store.put(key, stream)
    if size != wanted:
        raise StoreUnavailableError(key, None, f"the store took {size} of {wanted} bytes")
    return Segment(
        key=key,
        size_bytes=size,
        block_bytes=block_bytes,
        crcs=stream.block_crcs,
        table=stream.table,
        keyed=True,
    )


def _chunks(
    head: bytes, parts: Sequence[Part], chunk_bytes: int, check: Callable[[], None]
) -> Iterator[bytes | memoryview]:
    yield head
    for _, read in parts:
        data = read()
        for start in range(0, len(data), chunk_bytes):
            yield data[start : start + chunk_bytes]
    check()
