"""Which bytes of a segment are read at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.format.manifest import Segment


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
        size_bytes=segment.checked_bytes,
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
    if not segment.keyed and segment.table.begin <= segment.table.piece_bytes:
        # Its block is a piece and that piece's own CRC32, and so has the same CRC32 as any other.
        return True, pieces
    table = segment.size_bytes - segment.table.begin + request_bytes
    if table + _cost_bytes(pieces, request_bytes) < _cost_bytes(blocks, request_bytes):
        return True, pieces
    return False, blocks


def _cost_bytes(fetches: Sequence[Fetch], request_bytes: int) -> int:
    return sum(fetch.stop - fetch.start + request_bytes for fetch in fetches)
