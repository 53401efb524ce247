"""Whose state differs: from the checksums of all replicas to a verdict. Pure.

After every step all replicas hold the same bits (I3). A bit that flipped in one of them, or a
kernel that is not deterministic, shows as a checksum that the others do not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison of the replicas showed."""

    equal: bool
    """Whether all of them agree."""
    outliers: tuple[int, ...]
    """Positions that differ from more than half of the replicas; none where no such half exists."""

    @property
    def decided(self) -> bool:
        """Whether it is known who is right."""
        return self.equal or bool(self.outliers)


def compare_checksums(checksums: Sequence[int | None]) -> Comparison:
    """Compares one checksum of each replica, by position; None for one that has no state yet."""
    known = [checksum for checksum in checksums if checksum is not None]
    if len(set(known)) <= 1:
        return Comparison(equal=True, outliers=())
    common, count = Counter(known).most_common(1)[0]
    if 2 * count <= len(known):
        return Comparison(equal=False, outliers=())
    others = (p for p, c in enumerate(checksums) if c is not None and c != common)
    return Comparison(equal=False, outliers=tuple(others))


def was_wrong(before: Sequence[int | None], position: int, confirmed: int | None) -> bool:
    """Whether, in a comparison that nobody could decide, the replica at `position` was wrong.

    Args:
        before: checksums of that comparison.
        position: of the replica.
        confirmed: what all have come to, when the same steps were done again. Where nobody had it
            before, the error had spread to all by then, and nobody can be told from another.
    """
    mine = before[position]
    known = confirmed is not None and confirmed in before
    return known and mine is not None and mine != confirmed


def find_other_lanes(first: bytes, again: bytes) -> tuple[int, ...]:
    """Lanes whose gradients differ between two times that a step was done.

    Args:
        first, again: digests, eight bytes for each lane (`Commit.gradients`).
    """
    size = 8
    lanes = range(max(len(first), len(again)) // size)
    places = {lane: slice(size * lane, size * (lane + 1)) for lane in lanes}
    return tuple(lane for lane, place in places.items() if first[place] != again[place])
