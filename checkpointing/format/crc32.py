"""CRC32s, and the one of a run of bytes from those of its pieces, without the bytes.

By isal, at 10 GB/s; on a machine without it, such as a bare one with a GPU, by zlib, with the same
values.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

__all__ = ["combine_by_zlib", "crc32", "crc32_combine", "join_all", "join_crcs", "seed_crcs"]

_POLYNOMIAL = 0xEDB88320


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC32; bit 31 stands for x^0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def combine_by_zlib(first: int, second: int, size_bytes: int) -> int:
    """The CRC32 of two runs of bytes, of which the second has `size_bytes`."""
    power, square = 1 << 31, 1 << 23  # x^0 and x^8: a byte shifts the first by eight
    while size_bytes:
        if size_bytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        size_bytes >>= 1
    return _times(power, first) ^ second


try:
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:
    crc32, crc32_combine = zlib.crc32, combine_by_zlib


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
        joined = crc32_combine(joined, crc, min(left, piece_bytes))
        left -= piece_bytes
    return joined


def seed_crcs(crcs: Sequence[int], seed: int, piece_bytes: int, size_bytes: int) -> tuple[int, ...]:
    """CRC32s of pieces that each begin at `seed`, from those that begin at 0. Done twice it undoes
    itself, since a seed is one more term of a sum. Arguments as in `join_crcs`."""
    if not crcs:
        return ()
    each = crc32_combine(seed, 0, piece_bytes)
    last = crc32_combine(seed, 0, size_bytes - piece_bytes * (len(crcs) - 1))
    return (*(crc ^ each for crc in crcs[:-1]), crcs[-1] ^ last)
