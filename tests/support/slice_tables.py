"""Slices in columns, of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from checkpointing.format.boxes import Boxed, TensorInfo
from checkpointing.format.slices import SavedSlice, SliceTable, join


def slice_table(
    tensors: Mapping[str, TensorInfo], boxes: Iterable[Boxed], segment: str = "d/0"
) -> SliceTable:
    """`boxes` as slices at the beginning of `segment`, in the order that a manifest has."""
    rows = [
        SavedSlice(
            name=box.name, offsets=box.offsets, sizes=box.sizes, segment=segment, begin=0, end=0
        )
        for box in boxes
    ]
    return join([SliceTable.of(rows, tensors, [segment])], tensors)
