"""How the flat gradient is cut into buckets, which are reduced while backward still runs.

The flat gradient lies in the order in which backward finishes it, so what is finished is always a
prefix, and a bucket is a range of it: one FSDP2 parameter group or several. The sums are
elementwise, so the cuts never change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BUCKET_BYTES = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}
"""The most float32 bytes in a bucket, by the device. Larger groups are cut, so that a bucket's
exchange, its sum and its gathering overlap with its neighbours': on Gloo four buckets of 16 MiB
take half the time of one of 64 MiB (docs/decisions/008). A GPU's network is faster, and each
replica sends each other one a piece only; no GPU has measured it."""

MERGED = 4
"""A bucket has at least this part of the most, as groups are merged: smaller ones cost more in
collectives than they gain in overlap."""


def plan_buckets(group_ends: Sequence[int], *, least: int, most: int) -> tuple[int, ...]:
    """Merges small neighbouring groups and cuts large ones.

    Args:
        group_ends: rising; where each parameter group ends, in numbers.
        least: numbers in a bucket, unless there are fewer in all.
        most: numbers in a bucket; the last one may have up to `least` more.

    Returns:
        Where each bucket ends. The last one ends with the last group.
    """
    kept = [0]
    for end in group_ends:
        if end - kept[-1] >= least:
            kept.append(end)
    if len(kept) > 1:
        kept.pop()
    kept.append(group_ends[-1])
    return tuple(cut for start, end in pairwise(kept) for cut in _cut(start, end, most))


def _cut(start: int, end: int, most: int) -> list[int]:
    """Ends of the parts, as equal as whole numbers allow, that [start, end) is cut into."""
    parts = max(1, -(-(end - start) // most))
    return [start + (end - start) * (part + 1) // parts for part in range(parts)]


def plan_bounds(ends: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Moves the buckets' ends to where every bucket has an equal piece for each replica.

    An end moves back to a multiple of `replicas`, and the next bucket takes what was left; the last
    one moves forward, into the padding.

    Returns:
        The bounds between the buckets, 0 first: bucket b is [bounds[b], bounds[b + 1]), and may be
        empty.
    """
    inner = [end // replicas * replicas for end in ends[:-1]]
    return (0, *inner, -(-ends[-1] // replicas) * replicas)
