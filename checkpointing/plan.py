"""Who covers what, what is cut where, and which bytes are read at once. All pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.boxes import Boxed, Index, TensorInfo, check_inside, intersect, show_box
from checkpointing.errors import SliceError
from checkpointing.manifest import Segment


def check_coverage(tensors: Mapping[str, TensorInfo], slices: Iterable[Boxed]) -> None:
    """Checks that the slices cover every element of every tensor exactly once.

    Costs n log n per tensor for n slices in a row, and n times the slices abreast for a grid.

    Raises:
        SliceError: names the tensor and the first overlap, the size of the gap, or the misfit.
    """
    by_name: dict[str, list[Boxed]] = defaultdict(list)
    for part in slices:
        if part.name not in tensors:
            raise SliceError(
                part.name, f"{show_box(part)} was saved, but no rank declares the tensor"
            )
        check_inside(part, tensors[part.name].shape)
        if math.prod(part.sizes):
            by_name[part.name].append(part)
    for name, info in tensors.items():
        _check_tiling(name, info.shape, by_name[name])


def _check_tiling(name: str, shape: Index, parts: Sequence[Boxed]) -> None:
    # Boxes inside the shape, disjoint, whose volumes sum up to its volume: that is a tiling.
    if overlap := _first_overlap(parts):
        raise SliceError(name, f"{show_box(overlap[0])} and {show_box(overlap[1])} overlap")
    covered, wanted = sum(math.prod(part.sizes) for part in parts), math.prod(shape)
    if covered != wanted:
        raise SliceError(
            name, f"{len(parts)} slices cover {covered} of the {wanted} elements of shape {shape}"
        )


def _first_overlap(parts: Sequence[Boxed]) -> tuple[Boxed, Boxed] | None:
    """Sweeps along the axis with most distinct offsets, comparing only what lies abreast."""
    if len(parts) < 2:
        return None
    axes = range(len(parts[0].offsets))
    axis = max(axes, key=lambda a: len({part.offsets[a] for part in parts}), default=None)
    if axis is None:
        return parts[0], parts[1]
    active: list[Boxed] = []
    for part in sorted(parts, key=lambda p: p.offsets[axis]):
        active = [p for p in active if p.offsets[axis] + p.sizes[axis] > part.offsets[axis]]
        for other in active:
            if intersect(part.offsets, part.sizes, other.offsets, other.sizes):
                return other, part
        active.append(part)
    return None


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


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """One range read, and the spans that it serves."""

    start: int
    """First byte, at a block boundary."""
    stop: int
    """End, at a block boundary or the end of the object."""
    members: tuple[int, ...]
    """Numbers of the spans that lie within."""


def plan_fetches(
    spans: Sequence[tuple[int, int]],
    *,
    block_bytes: int,
    size_bytes: int,
    max_bytes: int,
    gap_bytes: int,
) -> list[Fetch]:
    """Turns byte spans of one object into range reads that hold them in whole blocks.

    Spans share a read where no more than `gap_bytes` lie between their blocks, until it would pass
    `max_bytes`; only there can a block be read twice.

    Args:
        spans: (start, stop) in any order.
        block_bytes: size of a CRC block.
        size_bytes: size of the object.
        max_bytes: bound on one read, which a single span may still exceed.
        gap_bytes: unwanted bytes that are read rather than beginning another read.
    """
    groups: list[tuple[int, int, list[int]]] = []
    for member in sorted(range(len(spans)), key=spans.__getitem__):
        start = spans[member][0] // block_bytes * block_bytes
        stop = min(-(-spans[member][1] // block_bytes) * block_bytes, size_bytes)
        members = [member]
        if groups:
            last_start, last_stop, last_members = groups[-1]
            merged = max(stop, last_stop)
            if start <= last_stop + gap_bytes and merged - last_start <= max_bytes:
                start, stop, members = last_start, merged, last_members
                members.append(member)
                groups.pop()
        groups.append((start, stop, members))
    return [Fetch(start=a, stop=b, members=tuple(members)) for a, b, members in groups]


def plan_reads(
    spans: Sequence[tuple[int, int]], segment: Segment, *, max_bytes: int, request_bytes: int
) -> tuple[bool, list[Fetch]]:
    """The range reads that get byte spans of a segment: of whole blocks, or of pieces.

    Pieces need the segment's table first, and pay where enough of the blocks is not wanted. Either
    way the whole read goes by one kind: pieces are checked as well as blocks are.

    Args:
        spans: (start, stop) in any order.
        segment: where they lie.
        max_bytes: see `plan_fetches`.
        request_bytes: what a request costs, in bytes that could be read in its place.

    Returns:
        Whether the reads are of pieces, and the reads.
    """
    blocks = plan_fetches(
        spans,
        block_bytes=segment.block_bytes,
        size_bytes=segment.size_bytes,
        max_bytes=max_bytes,
        gap_bytes=request_bytes,
    )
    if segment.table is None:
        return False, blocks
    pieces = plan_fetches(
        spans,
        block_bytes=segment.table.piece_bytes,
        size_bytes=segment.table.begin,
        max_bytes=max_bytes,
        gap_bytes=request_bytes,
    )
    table = segment.size_bytes - segment.table.begin + request_bytes
    if table + _cost_bytes(pieces, request_bytes) < _cost_bytes(blocks, request_bytes):
        return True, pieces
    return False, blocks


def _cost_bytes(fetches: Sequence[Fetch], request_bytes: int) -> int:
    return sum(fetch.stop - fetch.start + request_bytes for fetch in fetches)
