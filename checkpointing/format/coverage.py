"""Whether slices cover tensors: every element, each exactly once. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from checkpointing.errors import SliceError
from checkpointing.format.boxes import Boxed, TensorInfo, intersect, show_box
from checkpointing.format.slices import SliceTable


def check_coverage(slices: SliceTable) -> None:
    """Checks that the slices cover every element of every tensor of theirs exactly once.

    Args:
        slices: parts of tensors, by tensor in the order of these, each inside its own.

    Raises:
        SliceError: names the tensor and the first overlap, or the size of the gap.
    """
    for name, info, mine in zip(slices.names, slices.infos, slices.by_tensor(), strict=True):
        _check_tiling(name, info, slices[mine])


def _check_tiling(name: str, info: TensorInfo, parts: SliceTable) -> None:
    if _is_grid(info, parts):
        return
    # Boxes inside the shape, disjoint, whose volumes sum up to its volume: that is a tiling.
    full = [part for part in parts if math.prod(part.sizes)]
    if overlap := _first_overlap(full):
        raise SliceError(name, f"{show_box(overlap[0])} and {show_box(overlap[1])} overlap")
    covered, wanted = sum(math.prod(part.sizes) for part in full), math.prod(info.shape)
    if covered != wanted:
        raise SliceError(
            name,
            f"{len(full)} slices cover {covered} of the {wanted} elements of shape {info.shape}",
        )


def _is_grid(info: TensorInfo, parts: SliceTable) -> bool:
    """Whether the parts are all cells between the same cuts of each dimension, as most are: that is
    a tiling as well, and seen without looking at each part."""
    cells = 1
    place = np.zeros(len(parts), dtype=np.int64)
    for axis, extent in enumerate(info.shape):
        begins, at = np.unique(parts.offsets[:, axis], return_inverse=True)
        cuts = np.append(begins, extent)
        if not len(begins) or begins[0] != 0:
            return False
        if (parts.sizes[:, axis] != np.diff(cuts)[at]).any():
            return False
        cells *= len(begins)
        place = place * len(begins) + at
    return len(parts) == cells and len(np.unique(place)) == cells


def _first_overlap(parts: Sequence[Boxed]) -> tuple[Boxed, Boxed] | None:
    """Sweeps along the axis with most distinct offsets, comparing only what lies abreast: n log n
    for n slices in a row, and n times the slices abreast for others."""
    if len(parts) < 2:
        return None
    axes = range(len(parts[0].offsets))
    axis = max(axes, key=lambda a: len({part.offsets[a] for part in parts}), default=None)
    if axis is None:
        return parts[0], parts[1]
    active: list[Boxed] = []
    for part in sorted(parts, key=lambda p: p.offsets[axis]):
        active = [p for p in active if p.offsets[axis] + p.sizes[axis] > part.offsets[axis]]
        for other in active:
            if intersect(part.offsets, part.sizes, other.offsets, other.sizes):
                return other, part
        active.append(part)
    return None
