"""Who of several that hold the same state writes which part of it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from checkpointing.format.boxes import TensorSlice
from checkpointing.format.segment import slice_bytes


def plan_writers(slices: Sequence[TensorSlice], writers: int) -> list[list[TensorSlice]]:
    """Deals slices that `writers` hold alike, so that each byte is written once.

    The slices count as one string of bytes, of which each writer gets an equal stretch. Only where
    two stretches meet is a slice cut, between two rows of its first dimension that has several.
    Every writer computes the same from the same slices, so nothing is exchanged.

    Args:
        slices: what each writer holds, in the same order everywhere.
        writers: how many there are.

    Returns:
        The share of each writer. A slice without elements is in one of them, to be declared.
    """
    total = sum(slice_bytes(part) for part in slices)
    ends = [total * (writer + 1) // writers for writer in range(writers)]
    shares: list[list[TensorSlice]] = [[] for _ in ends]
    begin = 0
    for part in slices:
        for writer, cut in _deal(part, begin, ends):
            shares[writer].append(cut)
        begin += slice_bytes(part)
    return shares


def _deal(part: TensorSlice, begin: int, ends: Sequence[int]) -> Iterator[tuple[int, TensorSlice]]:
    """The writers of a slice whose first byte is `begin`, with what each gets of it."""
    if not slice_bytes(part):
        yield min(bisect_right(ends, begin), len(ends) - 1), part
        return
    axis = next((a for a, size in enumerate(part.sizes) if size > 1), None)
    rows = 1 if axis is None else part.sizes[axis]
    row_bytes, start = slice_bytes(part) // rows, 0
    for writer, end in enumerate(ends):
        last = writer + 1 == len(ends)
        stop = rows if last else max(start, min(rows, round((end - begin) / row_bytes)))
        if stop > start:
            yield writer, part if axis is None else _rows(part, axis, start, stop)
        start = stop


def _rows(part: TensorSlice, axis: int, start: int, stop: int) -> TensorSlice:
    offsets, sizes = list(part.offsets), list(part.sizes)
    offsets[axis], sizes[axis] = offsets[axis] + start, stop - start
    return replace(part, offsets=tuple(offsets), sizes=tuple(sizes))
