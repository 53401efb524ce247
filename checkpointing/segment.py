"""One segment: a safetensors file that is written as a stream and checked in blocks.

The file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes one
behind the other. All sizes are known before the first byte, so the header can go first and the
tensors can follow straight from their memory, with the CRCs computed as the bytes pass.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence

from checkpointing.boxes import TensorSlice
from checkpointing.dtypes import DTYPES, item_bytes

_RESERVED = "__metadata__"
_ALIGNMENT_BYTES = 8


def slice_bytes(part: TensorSlice) -> int:
    """Bytes of a slice's elements."""
    return math.prod(part.sizes) * item_bytes(part.dtype)


def header(parts: Sequence[TensorSlice]) -> bytes:
    """Everything in the file before the first tensor's bytes, for `parts` in file order.

    With the parts in order of falling element size every tensor is aligned to its elements, which
    lets readers map the file into memory.
    """
    table: dict[str, object] = {_RESERVED: {"format": "pt"}}
    end = 0
    for part in parts:
        begin, end = end, end + slice_bytes(part)
        table[_entry_name(part, table)] = {
            "dtype": DTYPES[part.dtype].tag,
            "shape": list(part.sizes),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _entry_name(part: TensorSlice, taken: Iterable[str]) -> str:
    """The tensor's own name, with its place where it is a part, made unique within the file."""
    name = part.name
    if tuple(part.sizes) != tuple(part.global_shape):
        ranges = zip(part.offsets, part.sizes, strict=True)
        name += "[" + ",".join(f"{start}:{start + size}" for start, size in ranges) + "]"
    while name in taken:
        name += "'"
    return name


def with_crcs(
    chunks: Iterable[bytes | memoryview], block_bytes: int, crcs: list[int]
) -> Iterator[bytes | memoryview]:
    """Passes a stream through; `crcs` has the CRC32 of each block once the stream has ended."""
    room = 0
    for chunk in chunks:
        data = memoryview(chunk)
        while len(data):
            if not room:
                crcs.append(0)
                room = block_bytes
            piece, data = data[:room], data[room:]
            crcs[-1] = zlib.crc32(piece, crcs[-1])
            room -= len(piece)
        yield chunk


def first_bad_block(data: bytes, crcs: Sequence[int], block_bytes: int) -> int | None:
    """The first block in `data` that is not what was written, if any; `crcs` has one for each.

    Missing bytes at the end make their block bad.
    """
    view = memoryview(data)
    for block, crc in enumerate(crcs):
        if zlib.crc32(view[block * block_bytes : (block + 1) * block_bytes]) != crc:
            return block
    return None
