"""Who of several readers of the same boxes reads what. Pure: every reader computes it alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.format.boxes import Index
from checkpointing.format.cutting import row_strides

WHOLE_BYTES = 1 << 20
"""A box of up to so many bytes is not cut."""

LEAST_BYTES = 16 << 20
"""Least that is worth a reader of its own. Where two shares meet, both read a CRC piece and the
table of the segment, 1/4096 of it: with segments of 512 MiB at most one byte in 50."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A part of a box: some of its rows (indices of the first dimension). A 0-d box is one row."""

    box: int
    """Number of the box."""
    first: int
    """First row, counted within the box."""
    rows: int
    """How many."""


def plan_shares(
    sizes: Sequence[Index],
    item_bytes: Sequence[int],
    parts: int,
    *,
    whole_bytes: int = WHOLE_BYTES,
    least_bytes: int = LEAST_BYTES,
) -> list[list[Rows]]:
    """Deals boxes out to readers, each a run of neighbours, so that they read about equal bytes.

    Each cut is where equal shares would have it, but for half of a box of up to `whole_bytes` or
    half a row of a larger one.

    Args:
        sizes: of each box, none empty, in the order in which they were saved.
        item_bytes: bytes of an element of each.
        parts: readers.
        whole_bytes: see `WHOLE_BYTES`.
        least_bytes: see `LEAST_BYTES`; where there is less for each, the last readers get nothing.

    Returns:
        The share of each reader.
    """
    totals = [math.prod(box) * each for box, each in zip(sizes, item_bytes, strict=True)]
    total = sum(totals)
    readers = max(1, min(parts, total // least_bytes))
    counts = [box[0] if box else 1 for box in sizes]
    row_bytes = [
        row_strides(box, n)[0] if box else n for box, n in zip(sizes, item_bytes, strict=True)
    ]
    cuts = [(0, 0)]
    box = begin = 0
    for reader in range(1, readers):
        target = total * reader // readers
        while begin + totals[box] <= target:
            begin, box = begin + totals[box], box + 1
        step = totals[box] if totals[box] <= whole_bytes else row_bytes[box]
        row = round((target - begin) / step) * (step // row_bytes[box])
        cuts.append((box, row) if row < counts[box] else (box + 1, 0))
    cuts.append((len(sizes), 0))
    shares = [_between(start, stop, counts) for start, stop in itertools.pairwise(cuts)]
    return shares + [[] for _ in range(parts - readers)]


def _between(start: tuple[int, int], stop: tuple[int, int], counts: Sequence[int]) -> list[Rows]:
    """What lies between two cuts, each (box, row)."""
    share = []
    for box in range(start[0], min(stop[0] + 1, len(counts))):
        first = start[1] if box == start[0] else 0
        end = stop[1] if box == stop[0] else counts[box]
        if end > first:
            share.append(Rows(box=box, first=first, rows=end - first))
    return share
