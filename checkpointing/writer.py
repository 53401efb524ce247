"""Writes one rank's share of a checkpoint.

    write_slices
      ├─ _check           every tensor is what its slice says
      ├─ _cut             slices above the bound into parts that lie contiguous in memory
      ├─ plan.pack        parts into segments
      └─ _write_segment   header, then each part's bytes from where they lie, CRCs on the way

Nothing written here can be seen as a checkpoint until `commit` publishes a manifest that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from checkpointing.boxes import TensorInfo, TensorSlice
from checkpointing.dtypes import item_bytes
from checkpointing.errors import SliceError, StoreUnavailableError
from checkpointing.layout import BLOCK_BYTES, SEGMENT_BYTES, Keys
from checkpointing.manifest import Receipt, SavedSlice, Segment
from checkpointing.memory import raw_bytes
from checkpointing.plan import pack, row_strides, split_box
from checkpointing.segment import header, slice_bytes, with_crcs
from checkpointing.stores import Store

_Part = tuple[TensorSlice, torch.Tensor]


def write_slices(
    store: Store,
    keys: Keys,
    *,
    rank: int,
    step: int,
    generation: int,
    attempt: int,
    slices: Sequence[tuple[TensorSlice, torch.Tensor]],
    segment_bytes: int = SEGMENT_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> Receipt:
    """Writes slices as segments; durable when it returns. Called on every rank that has a share.

    Contiguous tensors go out from their own memory: they must not change until this returns. Of
    another tensor one part at a time is copied.

    Args:
        store: where to.
        keys: names in the store.
        rank: the writer's number, different for every writer of this attempt.
        step: the step that the state belongs to.
        generation: the roster that the writer works under.
        attempt: which try at this step in this generation.
        slices: parts of tensors, with CPU tensors of exactly their sizes. Empty parts are declared
            but not written.
        segment_bytes: bound on the tensor bytes in one segment; a larger slice is cut.
        block_bytes: bytes of a segment under one CRC32.

    Raises:
        SliceError: a tensor is not what its slice says.
        StoreError: from the store.
    """
    tensors = _check(slices)
    parts = [part for whole in slices for part in _cut(*whole, segment_bytes)]
    # Falling element size keeps every tensor aligned in its file; the sort is stable.
    parts.sort(key=lambda part: -item_bytes(part[0].dtype))
    saved: list[SavedSlice] = []
    segments: list[Segment] = []
    for index, members in enumerate(pack([slice_bytes(part) for part, _ in parts], segment_bytes)):
        key = keys.segment(
            rank=rank, step=step, generation=generation, attempt=attempt, index=index
        )
        mine = [parts[member] for member in members]
        head = header([part for part, _ in mine])
        segments.append(_write_segment(store, key, head, mine, block_bytes))
        saved.extend(_locate([part for part, _ in mine], key, len(head)))
    return Receipt(
        rank=rank,
        step=step,
        generation=generation,
        attempt=attempt,
        tensors=tensors,
        slices=tuple(saved),
        segments=tuple(segments),
    )


def _check(slices: Sequence[_Part]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part, tensor in slices:
        given = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type)
        wanted = (part.dtype, tuple(part.sizes), "cpu")
        if given != wanted:
            raise SliceError(part.name, f"the tensor handed in is {given}, its slice says {wanted}")
        if tensors.setdefault(part.name, part.info) != part.info:
            raise SliceError(
                part.name, f"declared as {tensors[part.name]} and as {part.info} on one rank"
            )
    return tensors


def _cut(part: TensorSlice, tensor: torch.Tensor, max_bytes: int) -> Iterator[_Part]:
    if not tensor.numel():
        return
    size = item_bytes(part.dtype)
    strides = row_strides(part.sizes, size)
    start = (0,) * len(part.sizes)
    for offsets, sizes in split_box(
        start,
        part.sizes,
        strides,
        item_bytes=size,
        max_bytes=max_bytes,
        max_stride_bytes=max_bytes,
    ):
        where = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
        moved = tuple(a + b for a, b in zip(part.offsets, offsets, strict=True))
        cut = TensorSlice(part.name, part.global_shape, part.dtype, moved, sizes)
        yield cut, tensor[where] if where else tensor


def _write_segment(
    store: Store, key: str, head: bytes, parts: Sequence[_Part], block_bytes: int
) -> Segment:
    crcs: list[int] = []
    size = store.put(key, with_crcs(_chunks(head, parts, block_bytes), block_bytes, crcs))
    wanted = len(head) + sum(slice_bytes(part) for part, _ in parts)
    if size != wanted:
        raise StoreUnavailableError(key, None, f"the store took {size} of {wanted} bytes")
    return Segment(key=key, size_bytes=size, block_bytes=block_bytes, crcs=tuple(crcs))


def _chunks(head: bytes, parts: Sequence[_Part], chunk_bytes: int) -> Iterator[bytes | memoryview]:
    yield head
    for _, tensor in parts:
        data = raw_bytes(tensor)
        for start in range(0, len(data), chunk_bytes):
            yield data[start : start + chunk_bytes]


def _locate(parts: Sequence[TensorSlice], key: str, begin: int) -> Iterator[SavedSlice]:
    for part in parts:
        end = begin + slice_bytes(part)
        yield SavedSlice(
            name=part.name,
            offsets=part.offsets,
            sizes=part.sizes,
            segment=key,
            begin=begin,
            end=end,
        )
        begin = end
