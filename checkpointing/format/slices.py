"""Which part of which tensor lies where: one slice, and millions of them in columns.

A state of 70 billion parameters on 1,024 workers has 2.2 million slices. As Python objects they
take 800 MB, as columns of numbers 24 bytes each. Objects are made of those that are looked at.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from checkpointing.errors import SliceError
from checkpointing.format.boxes import Index, TensorInfo, check_inside
from checkpointing.format.dtypes import item_bytes

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


@dataclass(frozen=True, kw_only=True)
class SavedSlice:
    """A part of a tensor and where its bytes lie, in row-major order."""

    name: str
    """The tensor's name."""
    offsets: Index
    """First index of the part in every dimension."""
    sizes: Index
    """Extent of the part in every dimension."""
    segment: str
    """Key of the segment."""
    begin: int
    """First byte within the segment's file."""
    end: int
    """Behind its last byte."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SliceTable(Sequence[SavedSlice]):
    """Slices in columns: row i of each is about the i-th. Tensors and segments go by number."""

    names: tuple[str, ...]
    """Of the tensors that slices may be parts of."""
    infos: tuple[TensorInfo, ...]
    """What those are."""
    keys: tuple[str, ...]
    """Of the segments that they may lie in."""
    tensor: Ints
    """(n,)."""
    offsets: Ints
    """(n, most dimensions that a tensor has); 0 in dimensions that a tensor lacks."""
    sizes: Ints
    """As `offsets`; 1 in dimensions that a tensor lacks."""
    segment: Ints
    """(n,)."""
    begin: Ints
    """(n,); first byte within the segment."""

    @classmethod
    def of(
        cls, slices: Iterable[SavedSlice], tensors: Mapping[str, TensorInfo], keys: Iterable[str]
    ) -> SliceTable:
        """Slices of `tensors` in segments with `keys`, in the order given.

        Raises:
            SliceError: one is of none of these tensors, or not inside its own.
        """
        keys = tuple(keys)
        tensor_number = {name: number for number, name in enumerate(tensors)}
        segment_number = {key: number for number, key in enumerate(keys)}
        rows = list(slices)
        for row in rows:
            if row.name not in tensors:
                raise SliceError(row.name, "a slice was saved, but no rank declares the tensor")
            check_inside(row, tensors[row.name].shape)
        dims = most_dims(tensors.values())
        return cls(
            names=tuple(tensors),
            infos=tuple(tensors.values()),
            keys=keys,
            tensor=narrow([tensor_number[row.name] for row in rows]),
            **boxes_in_columns([(row.offsets, row.sizes) for row in rows], dims),
            segment=narrow([segment_number[row.segment] for row in rows]),
            begin=narrow([row.begin for row in rows]),
        )

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, place: int) -> SavedSlice: ...
    @overload
    def __getitem__(self, place: slice) -> SliceTable: ...
    def __getitem__(self, place: int | slice) -> SavedSlice | SliceTable:
        return self.rows(place) if isinstance(place, slice) else self._row(range(len(self))[place])

    def __iter__(self) -> Iterator[SavedSlice]:
        return map(self._row, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceTable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def rows(self, places: slice | Ints) -> SliceTable:
        """Some of the slices; those of a `slice` share the memory of these."""
        return replace(
            self,
            tensor=self.tensor[places],
            offsets=self.offsets[places],
            sizes=self.sizes[places],
            segment=self.segment[places],
            begin=self.begin[places],
        )

    def by_tensor(self) -> list[slice]:
        """Which of the slices each tensor has, where they are in the order of the tensors."""
        numbers = np.arange(len(self.names))
        begins = np.searchsorted(self.tensor, numbers, side="left").tolist()
        ends = np.searchsorted(self.tensor, numbers, side="right").tolist()
        return list(map(slice, begins, ends))

    def overlapping(self, offsets: Index, sizes: Index) -> Iterator[SavedSlice]:
        """Of slices of one tensor, in their order, those that may share an element with a box."""
        found = np.ones(len(self), dtype=bool)
        for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            begins = self.offsets[:, axis]
            found &= (begins < offset + size) & (begins + self.sizes[:, axis] > offset)
        return map(self._row, np.flatnonzero(found).tolist())

    def size_bytes(self) -> Ints:
        """(n,); bytes of each slice."""
        items = np.array([item_bytes(info.dtype) for info in self.infos], dtype=np.int64)
        volumes = self.sizes.prod(axis=1, dtype=np.int64)
        return np.asarray(volumes * items[self.tensor], dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """The columns as JSON values. `from_json` wants the tensors and segments beside them."""
        return {
            "count": len(self),
            "tensor": pack(self.tensor),
            "offsets": [pack(axis) for axis in self.offsets.T],
            "sizes": [pack(axis) for axis in self.sizes.T],
            "segment": pack(self.segment),
            "begin": pack(self.begin),
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], tensors: Mapping[str, TensorInfo], keys: Iterable[str]
    ) -> SliceTable:
        """The inverse of `to_json`. Raises ValueError for columns that do not fit each other or the
        tensors; whether they fit the segments is not looked at."""
        table = cls(
            names=tuple(tensors),
            infos=tuple(tensors.values()),
            keys=tuple(keys),
            tensor=unpack(data["tensor"], data["count"]),
            offsets=_side_by_side(data["offsets"], data["count"]),
            sizes=_side_by_side(data["sizes"], data["count"]),
            segment=unpack(data["segment"], data["count"]),
            begin=unpack(data["begin"], data["count"]),
        )
        table.check()
        return table

    def check(self) -> None:
        """Raises ValueError unless each slice is inside its tensor, and in one of the segments."""
        dims = most_dims(self.infos)
        if self.offsets.shape[1:] != (dims,) or self.sizes.shape[1:] != (dims,):
            raise ValueError(f"slices not of the {dims} dimensions that their tensors have")
        for column, bound in ((self.tensor, len(self.infos)), (self.segment, len(self.keys))):
            if len(column) and not (column.min() >= 0 and column.max() < bound):
                raise ValueError(f"numbers from {column.min()} to {column.max()} of {bound}")
        inside = self.begin >= 0
        for axis in range(dims):
            extents = [info.shape[axis] if axis < len(info.shape) else 1 for info in self.infos]
            offsets, sizes = self.offsets[:, axis], self.sizes[:, axis]
            inside &= (offsets >= 0) & (sizes >= 0)
            # A sum of both could overflow.
            inside &= sizes <= narrow(extents)[self.tensor] - offsets
        if not inside.all():
            bad = self.names[int(self.tensor[np.argmin(inside)])]
            raise ValueError(f"a slice of {bad!r} is not inside of it")

    def _row(self, place: int) -> SavedSlice:
        number = int(self.tensor[place])
        info, begin = self.infos[number], int(self.begin[place])
        dims = len(info.shape)
        sizes = tuple(self.sizes[place, :dims].tolist())
        return SavedSlice(
            name=self.names[number],
            offsets=tuple(self.offsets[place, :dims].tolist()),
            sizes=sizes,
            segment=self.keys[int(self.segment[place])],
            begin=begin,
            end=begin + math.prod(sizes) * item_bytes(info.dtype),
        )


def join(tables: Sequence[SliceTable], tensors: Mapping[str, TensorInfo]) -> SliceTable:
    """The slices of all, which are parts of `tensors`: by tensor in the order of these, and then by
    their place in it. Segments are in the order of their keys."""
    numbers = {name: number for number, name in enumerate(tensors)}
    keys = sorted({key for table in tables for key in table.keys})
    key_number = {key: number for number, key in enumerate(keys)}
    dims = most_dims(tensors.values())
    renumbered: dict[tuple[str, ...], Ints] = {}  # writers of a layout share their names
    for table in tables:
        if table.names not in renumbered:
            renumbered[table.names] = narrow([numbers[name] for name in table.names])
    whole = SliceTable(
        names=tuple(tensors),
        infos=tuple(tensors.values()),
        keys=tuple(keys),
        tensor=_joined([renumbered[one.names][one.tensor] for one in tables]),
        offsets=_joined([_widened(one.offsets, dims, 0) for one in tables], dims),
        sizes=_joined([_widened(one.sizes, dims, 1) for one in tables], dims),
        segment=_joined([narrow([key_number[k] for k in one.keys])[one.segment] for one in tables]),
        begin=_joined([one.begin for one in tables]),
    )
    places = np.lexsort((*reversed(whole.offsets.T), whole.tensor))
    return whole.rows(places)


def most_dims(infos: Iterable[TensorInfo]) -> int:
    """Dimensions of the tensor that has most."""
    return max((len(info.shape) for info in infos), default=0)


def boxes_in_columns(boxes: Sequence[tuple[Index, Index]], dims: int) -> dict[str, Ints]:
    """`SliceTable.offsets` and `sizes` of boxes of up to `dims` dimensions."""
    offsets = [[*offsets, *[0] * (dims - len(offsets))] for offsets, _ in boxes]
    sizes = [[*sizes, *[1] * (dims - len(sizes))] for _, sizes in boxes]
    shape = (len(boxes), dims)
    return {"offsets": narrow(offsets).reshape(shape), "sizes": narrow(sizes).reshape(shape)}


def narrow(values: Any) -> Ints:
    """As an array of the smallest integers whose sums of two do not overflow. Raises OverflowError
    above 63 bits."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32:
        return values
    wide = np.asarray(values, dtype=np.int64)
    small = not wide.size or (wide.min() >= 0 and wide.max() < 1 << 30)
    return wide.astype(np.int32) if small else wide


def pack(column: Ints) -> str:
    """Numbers as text: the differences of neighbours, of which most are alike, compressed."""
    steps = np.diff(column.astype(np.int64), prepend=np.int64(0)).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes())).decode()


def unpack(text: str, count: int) -> Ints:
    """The inverse of `pack`, of `count` numbers. Raises ValueError where it is not that many."""
    size = count * 8
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.b64decode(text, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(f"a column that is not compressed numbers ({error})") from None
    if len(raw) != size:
        raise ValueError(f"a column that is not of {count} numbers")
    return narrow(np.cumsum(np.frombuffer(raw, dtype="<i8"), dtype=np.int64))


def _side_by_side(columns: Sequence[str], count: int) -> Ints:
    axes = [unpack(one, count) for one in columns]
    return np.stack(axes, axis=1) if axes else np.zeros((count, 0), dtype=np.int32)


def _widened(boxes: Ints, dims: int, fill: int) -> Ints:
    missing = dims - boxes.shape[1]
    return np.pad(boxes, ((0, 0), (0, missing)), constant_values=fill) if missing else boxes


def _joined(columns: Sequence[Ints], dims: int | None = None) -> Ints:
    empty = np.zeros(0 if dims is None else (0, dims), dtype=np.int32)
    return np.concatenate([empty, *columns])
