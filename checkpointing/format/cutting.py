"""How boxes are cut, and how pieces are packed. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from checkpointing.format.boxes import Index


def row_strides(sizes: Index, item_bytes: int) -> Index:
    """Bytes from one index to the next in every dimension of a row-major array."""
    return tuple(item_bytes * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def extent_bytes(sizes: Index, strides: Index, item_bytes: int) -> int:
    """Bytes from the first to behind the last element of a non-empty box in a strided array."""
    steps = zip(sizes, strides, strict=True)
    return item_bytes + sum((size - 1) * stride for size, stride in steps)


def split_box(
    offsets: Index,
    sizes: Index,
    strides: Index,
    *,
    item_bytes: int,
    max_bytes: int,
    max_stride_bytes: int,
) -> Iterator[tuple[Index, Index]]:
    """Cuts a non-empty box of a row-major array, outermost dimension first.

    Each part extends over at most `max_bytes` (or is one element), and the rows that it leaves out
    on its way are never further apart than `max_stride_bytes`: what is skipped between two rows is
    less.

    Yields:
        Offsets and sizes, in row-major order.
    """
    axis = next((a for a, size in enumerate(sizes) if size > 1), None)
    if axis is None or (
        strides[axis] <= max_stride_bytes and extent_bytes(sizes, strides, item_bytes) <= max_bytes
    ):
        yield offsets, sizes
        return
    stride = strides[axis]
    rows = 1 if stride > max_stride_bytes else max(1, max_bytes // stride)
    for at in range(0, sizes[axis], rows):
        part_offsets = (*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :])
        part_sizes = (*sizes[:axis], min(rows, sizes[axis] - at), *sizes[axis + 1 :])
        yield from split_box(
            part_offsets,
            part_sizes,
            strides,
            item_bytes=item_bytes,
            max_bytes=max_bytes,
            max_stride_bytes=max_stride_bytes,
        )


def pack(sizes_bytes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Fills bins of `max_bytes` with items in their order; an item above that has its own bin.

    Returns:
        The item numbers of each bin; no bin is empty.
    """
    bins: list[list[int]] = []
    room = 0
    for item, size in enumerate(sizes_bytes):
        if not bins or size > room:
            bins.append([])
            room = max_bytes
        bins[-1].append(item)
        room -= size
    return bins
