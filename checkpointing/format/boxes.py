"""Boxes: the parts of tensors, and what two of them share.

All pure. A box is an n-dimensional interval (offsets, sizes) in a tensor's global shape; a 0-d
tensor has the one box ((), ()) of volume 1, and a box with a size of 0 is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from checkpointing.errors import SliceError
from checkpointing.format.dtypes import DTYPES

Index = tuple[int, ...]


class TensorInfo(NamedTuple):
    """What a tensor is, apart from its values."""

    shape: Index
    """Global shape."""
    dtype: str
    """torch's name without `torch.`."""


class Box(NamedTuple):
    """A part of a named tensor."""

    name: str
    offsets: Index
    sizes: Index


@dataclass(frozen=True)
class TensorSlice:
    """A part of a tensor together with what the whole is.

    Raises:
        SliceError: the box lies outside of the global shape, or the dtype cannot be stored.
    """

    name: str
    """Name of the tensor, the same on every rank."""
    global_shape: Index
    """Shape of the whole tensor."""
    dtype: str
    """torch's name of the element type without `torch.`."""
    offsets: Index
    """First index of the part in every dimension."""
    sizes: Index
    """Extent of the part in every dimension."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SliceError(
                self.name, f"dtype {self.dtype} cannot be stored; these can: {', '.join(DTYPES)}"
            )
        check_inside(self.box, self.global_shape)

    @property
    def box(self) -> Box:
        """The part alone."""
        return Box(self.name, tuple(self.offsets), tuple(self.sizes))

    @property
    def info(self) -> TensorInfo:
        """The whole alone."""
        return TensorInfo(tuple(self.global_shape), self.dtype)


class Boxed(Protocol):
    """Anything that says which part of which tensor it is."""

    @property
    def name(self) -> str: ...
    @property
    def offsets(self) -> Index: ...
    @property
    def sizes(self) -> Index: ...


def intersect(
    a_offsets: Index, a_sizes: Index, b_offsets: Index, b_sizes: Index
) -> tuple[Index, Index] | None:
    """Offsets and sizes of what two boxes of one tensor share; None if that is empty."""
    offsets = tuple(map(max, a_offsets, b_offsets))
    ends = (
        min(ao + an, bo + bn)
        for ao, an, bo, bn in zip(a_offsets, a_sizes, b_offsets, b_sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return None if any(n <= 0 for n in sizes) else (offsets, sizes)


def check_inside(box: Boxed, shape: Index) -> None:
    """Raises SliceError unless `box` has the dimensions of `shape` and lies within it."""
    fits = len(box.offsets) == len(box.sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= extent
        for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not fits:
        raise SliceError(box.name, f"{show_box(box)} is not inside the global shape {shape}")


def show_box(box: Boxed) -> str:
    """A box as Python would slice it."""
    ranges = zip(box.offsets, box.sizes, strict=False)
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in ranges) + "]"


def show_info(info: TensorInfo | None) -> str:
    """A tensor's type and shape in words; None: it is not there."""
    return f"{info.dtype} {list(info.shape)}" if info else "absent"
