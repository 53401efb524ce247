from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format.crc32 import (
    combine_by_zlib,
    crc32,
    crc32_combine,
    join_crcs,
    seed_crcs,
)
from checkpointing.format.segment import CheckedStream


def crcs_of(data: bytes, grain: int) -> tuple[int, ...]:
    return tuple(zlib.crc32(data[at : at + grain]) for at in range(0, len(data), grain))


@given(st.binary(max_size=300), st.integers(1, 20), st.integers(1, 6))
def test_crcs_of_blocks_from_those_of_pieces(data: bytes, piece: int, pieces: int) -> None:
    block = piece * pieces
    assert join_crcs(crcs_of(data, piece), piece, block, len(data)) == crcs_of(data, block)


def test_at_the_sizes_of_a_segment() -> None:
    data = bytes(range(256)) * (9 << 12) + b"end"  # two blocks, one of a MiB and three bytes
    found = join_crcs(crcs_of(data, 64 << 10), 64 << 10, 4 << 20, len(data))
    assert found == crcs_of(data, 4 << 20)
    assert len(found) == 3


@given(st.binary(max_size=300), st.integers(2, 20), st.integers(1, 50), st.data())
def test_a_stream_tells_crcs_of_what_has_passed(
    data: bytes, piece: int, chunk: int, draw: st.DataObject
) -> None:
    chunks = (data[at : at + chunk] for at in range(0, len(data), chunk))
    stream = CheckedStream(chunks, 3 * piece, piece, seed=7, whole_bytes=0)
    whole = b"".join(bytes(part) for part in stream)
    ends = sorted({*range(0, len(whole), piece), len(whole)})
    start, stop = sorted(draw.draw(st.lists(st.sampled_from(ends), min_size=2, max_size=2)))
    if start % piece == 0:
        assert stream.crc32_between(start, stop) == zlib.crc32(whole[start:stop])
    assert stream.crc32_between(piece + 1, 2 * piece) is None


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_zlib_gives_the_same_values(first: bytes, second: bytes) -> None:
    """Where there is no isal, zlib stands in; else this compares the two."""
    assert crc32(first) == zlib.crc32(first)
    joined = combine_by_zlib(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)
    assert joined == crc32_combine(crc32(first), crc32(second), len(second))


@given(st.binary(max_size=300), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_crcs_from_a_seed_on(data: bytes, piece: int, seed: int) -> None:
    plain = crcs_of(data, piece)
    seeded = tuple(zlib.crc32(data[at : at + piece], seed) for at in range(0, len(data), piece))
    assert seed_crcs(plain, seed, piece, len(data)) == seeded
    assert seed_crcs(seeded, seed, piece, len(data)) == plain
