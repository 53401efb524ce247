"""What a writer writes where: slices into parts, parts into segments. Pure.

A process plans the same slices once: from one save to the next of a generation nothing changes, and
a plan takes longer than all else that is done before the first byte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.errors import SliceError
from checkpointing.format.boxes import TensorInfo, TensorSlice
from checkpointing.format.cutting import pack, row_strides, split_box
from checkpointing.format.dtypes import item_bytes
from checkpointing.format.segment import header, slice_bytes
from checkpointing.format.slices import SavedSlice

_ALIGNMENT_BYTES = 64

_PLANS = 64
"""Plans that a process keeps: one for each worker of a node."""


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


def declare(slices: Sequence[TensorSlice]) -> dict[str, TensorInfo]:
    """The tensors that slices are parts of. Raises SliceError where two of them disagree."""
    tensors: dict[str, TensorInfo] = {}
    for part in slices:
        if tensors.setdefault(part.name, part.info) != part.info:
            raise SliceError(
                part.name, f"declared as {tensors[part.name]} and as {part.info} on one rank"
            )
    return tensors


@dataclass(frozen=True, kw_only=True)
class SegmentPlan:
    """A segment that is to be written."""

    head: bytes
    """What is before the tensors."""
    parts: tuple[TensorSlice, ...]
    """What it holds, in its order."""
    members: tuple[int, ...]
    """Their numbers among all that were to be written."""

    def places(self, key: str) -> Iterator[SavedSlice]:
        """Where its parts lie once it is written under `key`."""
        begin = len(self.head)
        for part in self.parts:
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


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """What is in a buffer, in parts: the same in every save of a generation."""

    needed_bytes: int
    """Least bytes of the buffer."""
    tensors: Mapping[str, TensorInfo]
    """What the slices are parts of."""
    parts: tuple[TensorSlice, ...]
    """The slices, cut where they are too large for a segment."""
    places: tuple[int, ...]
    """First byte of each in the buffer."""


@functools.lru_cache(maxsize=_PLANS)
def plan_parts(slices: tuple[TensorSlice, ...], segment_bytes: int) -> SharedParts:
    """Cuts slices that lie in a buffer. Arguments as for `write_shared`.

    Raises:
        SliceError: a tensor is declared in two ways.
    """
    begins, needed = plan_places(slices)
    cuts = [
        (cut, begin + inside)
        for whole, begin in zip(slices, begins, strict=True)
        for cut, inside in _cut(whole, segment_bytes)
    ]
    return SharedParts(
        needed_bytes=needed,
        tensors=declare(slices),
        parts=tuple(part for part, _ in cuts),
        places=tuple(place for _, place in cuts),
    )


@functools.lru_cache(maxsize=_PLANS)
def plan_packing(
    parts: tuple[TensorSlice, ...],
    apart: frozenset[TensorSlice],
    segment_bytes: int,
    piece_bytes: int | None,
) -> tuple[SegmentPlan, ...]:
    """Fills segments with parts, none above `segment_bytes`; those `apart` have their own."""
    plans: list[SegmentPlan] = []
    for alone in (True, False):
        group = [member for member, part in enumerate(parts) if (part in apart) is alone]
        # Falling element size keeps every tensor aligned in its file; the sort is stable.
        group.sort(key=lambda member: -item_bytes(parts[member].dtype))
        for bin_ in pack([slice_bytes(parts[member]) for member in group], segment_bytes):
            members = tuple(group[place] for place in bin_)
            mine = tuple(parts[member] for member in members)
            plans.append(SegmentPlan(head=header(mine, piece_bytes), parts=mine, members=members))
    return tuple(plans)


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


def _cut(part: TensorSlice, max_bytes: int) -> Iterator[tuple[TensorSlice, int]]:
    """Parts of a slice, each with its first byte within it."""
    strides = row_strides(part.sizes, item_bytes(part.dtype))
    for offsets, cut in split_slice(part, max_bytes):
        yield cut, sum(at * stride for at, stride in zip(offsets, strides, strict=True))
