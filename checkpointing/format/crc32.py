"""The CRC32 of a run of bytes, from the CRC32s of its pieces and without the bytes."""

from __future__ import annotations

from collections.abc import Sequence

from isal import isal_zlib


def join_crcs(
    crcs: Sequence[int], piece_bytes: int, block_bytes: int, size_bytes: int
) -> tuple[int, ...]:
    """The CRC32 of each block of an object, from those of its pieces.

    Args:
        crcs: of each piece; the last piece may be short.
        piece_bytes: of all others.
        block_bytes: a multiple of that.
        size_bytes: of the object.
    """
    each = block_bytes // piece_bytes
    return tuple(
        join_all(
            crcs[first : first + each],
            piece_bytes,
            min(block_bytes, size_bytes - first * piece_bytes),
        )
        for first in range(0, len(crcs), each)
    )


def join_all(crcs: Sequence[int], piece_bytes: int, size_bytes: int) -> int:
    """The CRC32 of `size_bytes` from those of its pieces, of which the last may be short."""
    joined, left = 0, size_bytes
    for crc in crcs:
        joined = isal_zlib.crc32_combine(joined, crc, min(left, piece_bytes))
        left -= piece_bytes
    return joined
