"""The CRC32 of a run of bytes, from the CRC32s of its pieces and without the bytes."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence


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
    lengths = [piece_bytes] * len(crcs)
    if lengths:
        lengths[-1] = size_bytes - piece_bytes * (len(crcs) - 1)
    pieces = list(zip(crcs, lengths, strict=True))
    each = block_bytes // piece_bytes
    return tuple(_joined(pieces[first : first + each]) for first in range(0, len(pieces), each))


def join_all(crcs: Sequence[int], piece_bytes: int, size_bytes: int) -> int:
    """The CRC32 of `size_bytes` from those of its pieces, of which the last may be short."""
    (crc,) = join_crcs(crcs, piece_bytes, max(1, len(crcs)) * piece_bytes, size_bytes) or (0,)
    return crc


def _joined(pieces: Sequence[tuple[int, int]]) -> int:
    whole, *rest = pieces
    crc = whole[0]
    for piece, length in rest:
        a, b, c, d = _shift(length)
        crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24] ^ piece
    return crc


@functools.lru_cache(maxsize=16)
def _shift(length: int) -> tuple[tuple[int, ...], ...]:
    """What `length` more bytes make of a CRC32, as a table for each byte of it.

    crc32(B, crc32(A)) is L(crc32(A)) ^ crc32(B), where L is linear over bits and depends on the
    length of B alone. So running over zeros once for each bit finds it.
    """
    zeros = bytes(length)
    none = zlib.crc32(zeros)
    tables = []
    for byte in range(4):
        table = [0]
        for bit in range(8 * byte, 8 * byte + 8):
            column = zlib.crc32(zeros, 1 << bit) ^ none
            table += [entry ^ column for entry in table]
        tables.append(tuple(table))
    return tuple(tables)
