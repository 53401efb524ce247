"""One segment: a safetensors file that is written as a stream and checked in blocks.

    length of the header (8 bytes)
    header (JSON)
    tensors, one behind the other
    CRC32s of each 16 KiB of all that, as a last tensor

All sizes are known before the first byte, so the header can go first and the tensors can follow
straight from their memory, with the CRCs computed as the bytes pass. The manifest has the CRC32s of
blocks of 4 MiB of all before the table, for reads of whole blocks, and that of the table, which is
for all other reads. No CRC covers bytes that tell it, and each begins at the CRC32 of the segment's
key, so that the same bytes under another key have other ones.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence

from checkpointing.errors import CorruptError
from checkpointing.format.boxes import TensorSlice
from checkpointing.format.crc32 import crc32, join_all, join_crcs, seed_crcs
from checkpointing.format.dtypes import DTYPES, item_bytes
from checkpointing.format.layout import CRC_BYTES, table_bytes
from checkpointing.format.manifest import CrcTable, Segment

TABLE = "__crc32__"
"""Name of the tensor that has the CRC32s of the pieces."""

_RESERVED = "__metadata__"
_ALIGNMENT_BYTES = 8
_ENTRY_BYTES = 160
"""Room for the table's entry in the header, whatever its numbers."""


def slice_bytes(part: TensorSlice) -> int:
    """Bytes of a slice's elements."""
    return math.prod(part.sizes) * item_bytes(part.dtype)


def header(parts: Sequence[TensorSlice], piece_bytes: int | None = None) -> bytes:
    """Everything in the file before the first tensor's bytes, for `parts` in file order.

    With the parts in order of falling element size every tensor is aligned to its elements, which
    lets readers map the file into memory.

    Args:
        parts: what the file holds.
        piece_bytes: bytes under one CRC32 of the table; None for no table.
    """
    entries: dict[str, object] = {_RESERVED: {"format": "pt"}}
    end = 0
    for part in parts:
        begin, end = end, end + slice_bytes(part)
        name = _entry_name(part, entries)
        entries[name] = _entry(DTYPES[part.dtype].tag, part.sizes, begin, end)
    text = _json(entries)
    # The table's size depends on the header's, so that is settled first, with room for its entry.
    size = len(text) if piece_bytes is None else len(text) + _ENTRY_BYTES
    size += -size % _ALIGNMENT_BYTES
    if piece_bytes is not None:
        table = table_bytes(8 + size + end, piece_bytes)
        entries[TABLE] = _entry("U32", (table // CRC_BYTES,), end, end + table)
        text = _json(entries)
    return size.to_bytes(8, "little") + text.ljust(size)


def _entry(tag: str, sizes: Sequence[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": tag, "shape": list(sizes), "data_offsets": [begin, end]}


def _json(entries: dict[str, object]) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def _entry_name(part: TensorSlice, taken: Iterable[str]) -> str:
    """The tensor's own name, with its place where it is a part, made unique within the file."""
    name = part.name
    if tuple(part.sizes) != tuple(part.global_shape):
        ranges = zip(part.offsets, part.sizes, strict=True)
        name += "[" + ",".join(f"{start}:{start + size}" for start, size in ranges) + "]"
    while name in taken or name == TABLE:
        name += "'"
    return name


class CheckedStream:
    """A file's bytes on their way, with the table behind them; to be passed through once. Then
    `block_crcs` and `table` are what the manifest has of it.

    Args:
        body: header and tensors.
        block_bytes: bytes under one CRC32 of the manifest.
        piece_bytes: bytes under one CRC32 of the table, a divisor of that; None for no table.
        seed: what the CRC32s begin at that go into manifest and table.
        whole_bytes: of the file, table included.
    """

    def __init__(
        self,
        body: Iterable[bytes | memoryview],
        block_bytes: int,
        piece_bytes: int | None,
        seed: int,
        whole_bytes: int,
    ) -> None:
        if piece_bytes is not None and block_bytes % piece_bytes:
            raise ValueError(f"blocks of {block_bytes} bytes are not whole pieces of {piece_bytes}")
        self._body, self._block_bytes, self._piece_bytes = body, block_bytes, piece_bytes
        self._seed, self.whole_bytes = seed, whole_bytes
        self._crcs: list[int] = []  # from 0 on, as S3 counts
        self.size_bytes = 0
        self.block_crcs: tuple[int, ...] = ()
        self.table: CrcTable | None = None

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for chunk in with_crcs(self._with_table(), self._grain_bytes, self._crcs):
            self.size_bytes += len(chunk)
            yield chunk

    def crc32_between(self, start: int, stop: int) -> int | None:
        """The CRC32 of bytes that have passed; None where they are not whole pieces."""
        grain = self._grain_bytes
        if start % grain or (stop % grain and stop != self.size_bytes):
            return None
        return join_all(self._crcs[start // grain : -(-stop // grain)], grain, stop - start)

    @property
    def _grain_bytes(self) -> int:
        return self._piece_bytes or self._block_bytes

    def _with_table(self) -> Iterator[bytes | memoryview]:
        yield from self._body
        # Asked for more when all of it has been counted, so the CRCs are complete.
        begin, block = self.size_bytes, self._block_bytes
        blocks = join_crcs(self._crcs, self._grain_bytes, block, begin)
        self.block_crcs = seed_crcs(blocks, self._seed, block, begin)
        if self._piece_bytes is not None:
            data = pack_crcs(seed_crcs(self._crcs, self._seed, self._piece_bytes, begin))
            self.table = CrcTable(
                begin=begin, piece_bytes=self._piece_bytes, crc32=crc32(data, self._seed)
            )
            yield data


def pack_crcs(crcs: Sequence[int]) -> bytes:
    """A table's bytes."""
    return struct.pack(f"<{len(crcs)}I", *crcs)


def table_crcs(data: bytes) -> array[int]:
    """The CRC32s in a table."""
    return array("I", struct.unpack(f"<{len(data) // CRC_BYTES}I", data))


def key_seed(key: str) -> int:
    """What the CRC32s of a keyed segment begin at."""
    return crc32(key.encode())


def seed_of(segment: Segment) -> int:
    """What the CRC32s of a segment begin at."""
    return key_seed(segment.key) if segment.keyed else 0


def crcs_told_by(data: bytes, segment: Segment, table: CrcTable) -> tuple[int, ...]:
    """The CRC32 of each block of the segment of which `data` is the table, from that alone."""
    seed, piece, block = seed_of(segment), table.piece_bytes, segment.block_bytes
    crcs = list(seed_crcs(table_crcs(data), seed, piece, table.begin))
    if not segment.keyed:
        for _ in with_crcs([data], piece, crcs, room=-table.begin % piece):
            pass  # the blocks are of the whole file, so the table is behind what it is about
    joined = join_crcs(crcs, piece, block, segment.checked_bytes)
    return seed_crcs(joined, seed, block, segment.checked_bytes)


def check_table(data: bytes, segment: Segment, table: CrcTable) -> None:
    """Compares what `data`, the table of a segment, says with the CRC32s of the blocks.

    Raises:
        CorruptError: they differ, as where a bit flipped before the table had a CRC32 of its own.
    """
    told = crcs_told_by(data, segment, table)
    if told == segment.crcs:
        return
    bad = [block for block, crc in enumerate(told) if crc != segment.crcs[block]]
    fact = f"what its table of CRC32s says of blocks {bad[:5]} is not what they hold"
    raise CorruptError(segment.key, f"{fact} ({len(bad)} of {len(told)})")


def with_crcs(
    chunks: Iterable[bytes | memoryview], block_bytes: int, crcs: list[int], room: int = 0
) -> Iterator[bytes | memoryview]:
    """Passes a stream through; `crcs` has the CRC32 of each block once the stream has ended.

    `room` is how many bytes are still to come under the last of those that are in it before.
    """
    for chunk in chunks:
        data = memoryview(chunk)
        while len(data):
            if not room:
                crcs.append(0)
                room = block_bytes
            piece, data = data[:room], data[room:]
            crcs[-1] = crc32(piece, crcs[-1])
            room -= len(piece)
        yield chunk


def first_bad_block(data: bytes, crcs: Sequence[int], block_bytes: int, seed: int) -> int | None:
    """The first block in `data` that is not what was written, if any; `crcs` has one for each, and
    they begin at `seed`. That no bytes are missing is for the caller to see."""
    view = memoryview(data)
    for block, crc in enumerate(crcs):
        if crc32(view[block * block_bytes : (block + 1) * block_bytes], seed) != crc:
            return block
    return None


def bad_block_of(segment: Segment, start: int, data: bytes) -> int | None:
    """The first block of `segment` in `data`, its bytes from `start` on, that is not what was
    written, if any. `data` is whole blocks, but for the segment's last, and none of it is missing.
    """
    first = start // segment.block_bytes
    behind = -(-(start + len(data)) // segment.block_bytes)
    crcs = segment.crcs[first:behind]
    bad = first_bad_block(data, crcs, segment.block_bytes, seed_of(segment))
    return None if bad is None else first + bad
