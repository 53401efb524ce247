"""Writes one rank's share of a checkpoint from tensors: checks and cuts them, and hands their bytes
to `byte_writer.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from checkpointing.errors import SliceError
from checkpointing.format.boxes import TensorSlice
from checkpointing.format.layout import BLOCK_BYTES, PIECE_BYTES, SEGMENT_BYTES, Keys
from checkpointing.format.manifest import Receipt
from checkpointing.format.tensor_bytes import raw_bytes
from checkpointing.stores import Store
from checkpointing.write.byte_writer import Attempt, Part, write_parts
from checkpointing.write.segment_plan import declare, split_slice


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
    piece_bytes: int | None = PIECE_BYTES,
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
        block_bytes: bytes of a segment under one CRC32 of the manifest.
        piece_bytes: see `write_shared`.

    Raises:
        SliceError: a tensor is not what its slice says.
        StoreError: from the store.
    """
    _check(slices)
    return write_parts(
        store,
        keys,
        Attempt(rank=rank, step=step, generation=generation, attempt=attempt),
        declare([part for part, _ in slices]),
        [part for whole in slices for part in _cut(*whole, segment_bytes)],
        segment_bytes=segment_bytes,
        block_bytes=block_bytes,
        piece_bytes=piece_bytes,
    )


def _check(slices: Sequence[tuple[TensorSlice, torch.Tensor]]) -> None:
    for part, tensor in slices:
        given = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type)
        wanted = (part.dtype, tuple(part.sizes), "cpu")
        if given != wanted:
            raise SliceError(part.name, f"the tensor handed in is {given}, its slice says {wanted}")


def _cut(part: TensorSlice, tensor: torch.Tensor, max_bytes: int) -> Iterator[Part]:
    for offsets, cut in split_slice(part, max_bytes):
        where = tuple(slice(at, at + n) for at, n in zip(offsets, cut.sizes, strict=True))
        yield cut, partial(raw_bytes, tensor[where] if where else tensor)
