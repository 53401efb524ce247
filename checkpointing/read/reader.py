"""Reads any part of any tensor, whatever the layout it was saved in.

    Reader.read_many
      ├─ _parts           each wanted box ∩ each saved slice, cut to spans of bounded length
      ├─ plan_reads       spans of one segment into range reads of whole CRC blocks or pieces
      ├─ CheckedSource    reads and verifies: tables where pieces are read, then the spans
      └─ _fetch           copies each span into its place (a few threads)

Every byte handed out has passed its CRC32. Nothing is unpickled: bytes become elements, no more.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from checkpointing.errors import IncompatibleError, SliceError
from checkpointing.format.boxes import Box, Index, check_inside, intersect
from checkpointing.format.cutting import extent_bytes, row_strides, split_box
from checkpointing.format.dtypes import item_bytes
from checkpointing.format.manifest import Manifest, Segment
from checkpointing.format.slices import SavedSlice
from checkpointing.read.checked_source import CheckedSource, Checks, block_checks
from checkpointing.read.fetches import Fetch, plan_reads
from checkpointing.stores import RangeSource

_Array = np.ndarray[Any, np.dtype[Any]]

_SPAN_BYTES = 32 << 20
_FETCH_BYTES = 64 << 20
_REQUEST_BYTES = 96 << 10
"""What a range read costs besides its bytes, in bytes: a gap of up to so many is read along. More
would read more than 1.05 times what a reshard of a small model needs; with less, a quarter of each
row of 112 KiB would be a request of its own."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of a saved slice on its way into an output."""

    target: int
    flat: bool
    """Whether `where` counts the output's elements instead of having an index per dimension."""
    where: tuple[slice, ...]
    sizes: Index
    strides: Index
    item_bytes: int
    start: int
    stop: int


_Plan = tuple[Segment, bool, list[Fetch], list[_Part]]
"""A segment, whether it is read by the pieces of its table, the reads, and what they are for."""

_Job = tuple[Checks, Fetch, list[_Part]]


class Reader:
    """Reads a committed checkpoint. Keeps no data of it, and may be used from several threads.

    Args:
        store: where the checkpoint lies.
        manifest: which one.
        threads: how many range reads are under way at once; each holds up to 64 MiB.

    Raises (every method):
        IncompatibleError: the checkpoint has no such tensor.
        SliceError: a box outside of its tensor, or elements that no slice holds.
        CorruptError: a block, a piece or a table failed its CRC twice.
        MissingError: a segment is gone.
        StoreUnavailableError: from the store.
    """

    def __init__(self, store: RangeSource, manifest: Manifest, *, threads: int = 8) -> None:
        self.manifest = manifest
        self._source, self._threads = CheckedSource(store), threads

    def read(self, name: str, offsets: Index, sizes: Index) -> torch.Tensor:
        """One box of one tensor, as a contiguous CPU tensor of shape `sizes`."""
        return self.read_many([Box(name, offsets, sizes)])[0]

    def read_full(self, name: str) -> torch.Tensor:
        """One whole tensor."""
        shape = self._shape_and_dtype(name)[0]
        return self.read(name, (0,) * len(shape), shape)

    def read_many(
        self,
        boxes: Sequence[tuple[str, Index, Index]],
        into: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Many boxes (name, offsets, sizes), in their order; reads what lies together at once.

        Args:
            boxes: what to read.
            into: contiguous CPU tensors to fill, of the boxes' sizes and the checkpoint's dtypes;
                new ones by default. After an error they hold anything.
        """
        wanted = [Box(name, tuple(offsets), tuple(sizes)) for name, offsets, sizes in boxes]
        if into is None:
            tensors = [self._empty(box) for box in wanted]
        else:
            tensors = [self._fitting(box, one) for box, one in zip(wanted, into, strict=True)]
        outputs = [_raw_view(tensor) for tensor in tensors]
        plans = self.plan(wanted)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="checkpoint-read") as pool:
            checks = pool.map(self._checks, plans)  # tables first, all at once
            jobs = [
                job for plan, its in zip(plans, checks, strict=True) for job in _jobs(plan, its)
            ]
            for _ in pool.map(partial(self._fetch, outputs), jobs):
                pass  # the first error surfaces here, and cancels what has not begun
        return tensors

    def plan(self, wanted: Sequence[Box]) -> list[_Plan]:
        """The range reads that make up boxes, by segment. Reads nothing."""
        by_segment: dict[str, list[_Part]] = defaultdict(list)
        for target, box in enumerate(wanted):
            for key, part in self._parts(target, box):
                by_segment[key].append(part)
        return [self._plan(key, parts) for key, parts in by_segment.items()]

    def _shape_and_dtype(self, name: str) -> tuple[Index, str]:
        info = self.manifest.tensors.get(name)
        if info is None:
            raise IncompatibleError(name, f"absent in the checkpoint of step {self.manifest.step}")
        return info

    def _empty(self, box: Box) -> torch.Tensor:
        shape, dtype = self._shape_and_dtype(box.name)
        check_inside(box, shape)
        return torch.empty(box.sizes, dtype=getattr(torch, dtype))

    def _fitting(self, box: Box, tensor: torch.Tensor) -> torch.Tensor:
        shape, dtype = self._shape_and_dtype(box.name)
        check_inside(box, shape)
        given = str(tensor.dtype).removeprefix("torch.")
        if given != dtype:
            raise IncompatibleError(
                box.name, f"{dtype} in the checkpoint of step {self.manifest.step}, {given} here"
            )
        if tuple(tensor.shape) != box.sizes or not tensor.is_contiguous():
            fact = f"{box} cannot be read into shape {tuple(tensor.shape)}"
            raise SliceError(box.name, f"{fact}, strides {tensor.stride()}")
        return tensor

    def _parts(self, target: int, box: Box) -> Iterator[tuple[str, _Part]]:
        size = item_bytes(self.manifest.tensors[box.name].dtype)
        found = 0
        for saved in self.manifest.parts_of(box.name).overlapping(box.offsets, box.sizes):
            shared = intersect(saved.offsets, saved.sizes, box.offsets, box.sizes)
            if shared:
                found += math.prod(shared[1])
                block_bytes = self.manifest.segments[saved.segment].block_bytes
                for part in _spans(target, box, saved, shared, size, block_bytes):
                    yield saved.segment, part
        if found != math.prod(box.sizes):
            # Elements that no slice holds would come back as whatever was in memory.
            fact = f"the slices of step {self.manifest.step} hold {found} of the"
            raise SliceError(box.name, f"{fact} {math.prod(box.sizes)} elements of {box}")

    def _plan(self, key: str, parts: list[_Part]) -> _Plan:
        segment = self.manifest.segments[key]
        by_pieces, fetches = plan_reads(
            [(part.start, part.stop) for part in parts],
            segment,
            max_bytes=_FETCH_BYTES,
            request_bytes=_REQUEST_BYTES,
        )
        return segment, by_pieces, fetches, parts

    def _checks(self, plan: _Plan) -> Checks:
        segment, by_pieces, *_ = plan
        if by_pieces and segment.table is not None:
            return self._source.piece_checks(segment, segment.table)
        return block_checks(segment)

    def _fetch(self, outputs: Sequence[_Array], job: _Job) -> None:
        checks, fetch, parts = job
        data = self._source.read(checks, fetch.start, fetch.stop)
        for part in parts:
            output = outputs[part.target]
            (output.reshape(-1) if part.flat else output)[part.where] = np.ndarray(
                part.sizes,
                dtype=f"u{part.item_bytes}",
                buffer=data,
                offset=part.start - fetch.start,
                strides=part.strides,
            )


def _jobs(plan: _Plan, checks: Checks) -> Iterator[_Job]:
    _, _, fetches, parts = plan
    for fetch in fetches:
        yield checks, fetch, [parts[member] for member in fetch.members]


def _spans(
    target: int,
    box: Box,
    saved: SavedSlice,
    shared: tuple[Index, Index],
    size: int,
    block_bytes: int,
) -> Iterator[_Part]:
    """What a box shares with a saved slice, as parts with no gap that a read would not bridge."""
    strides = row_strides(saved.sizes, size)
    if shared[1][1:] == saved.sizes[1:] == box.sizes[1:] and strides and saved.begin % size == 0:
        yield from _runs(target, box, saved, shared, size, block_bytes)
        return
    for offsets, sizes in split_box(
        *shared,
        strides,
        item_bytes=size,
        max_bytes=_SPAN_BYTES,
        max_stride_bytes=min(block_bytes, _REQUEST_BYTES),
    ):
        start = saved.begin + sum(
            (at - base) * stride
            for at, base, stride in zip(offsets, saved.offsets, strides, strict=True)
        )
        into = zip(offsets, box.offsets, sizes, strict=True)
        yield _Part(
            target=target,
            flat=False,
            where=tuple(slice(at - base, at - base + n) for at, base, n in into),
            sizes=sizes,
            strides=strides,
            item_bytes=size,
            start=start,
            stop=start + extent_bytes(sizes, strides, size),
        )


def _runs(
    target: int,
    box: Box,
    saved: SavedSlice,
    shared: tuple[Index, Index],
    size: int,
    block_bytes: int,
) -> Iterator[_Part]:
    """As `_spans`, of whole rows: one run of bytes there and here, so it is cut where blocks end.
    Cut between rows, the block there would be read with both parts."""
    (first, *_), (rows, *rest) = shared
    row = size * math.prod(rest)
    begin = saved.begin + (first - saved.offsets[0]) * row
    moved = (first - box.offsets[0]) * row - begin
    step = max(1, _SPAN_BYTES // block_bytes) * block_bytes
    cuts = [begin, *range((begin // step + 1) * step, begin + rows * row, step), begin + rows * row]
    for start, stop in itertools.pairwise(cuts):
        yield _Part(
            target=target,
            flat=True,
            where=(slice((start + moved) // size, (stop + moved) // size),),
            sizes=((stop - start) // size,),
            strides=(size,),
            item_bytes=size,
            start=start,
            stop=stop,
        )


def _raw_view(tensor: torch.Tensor) -> _Array:
    """The tensor's memory as unsigned integers: numpy has no bfloat16, and bits are bits."""
    raw: _Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw.view(f"u{tensor.element_size()}").reshape(tuple(tensor.shape))
