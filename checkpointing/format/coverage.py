"""Whether slices cover tensors: every element, each exactly once. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from checkpointing.errors import SliceError
from checkpointing.format.boxes import Boxed, Index, TensorInfo, check_inside, intersect, show_box


def check_coverage(tensors: Mapping[str, TensorInfo], slices: Iterable[Boxed]) -> None:
    """Checks that the slices cover every element of every tensor exactly once.

    Costs n log n per tensor for n slices in a row, and n times the slices abreast for a grid.

    Raises:
        SliceError: names the tensor and the first overlap, the size of the gap, or the misfit.
    """
    by_name: dict[str, list[Boxed]] = defaultdict(list)
    for part in slices:
        if part.name not in tensors:
            raise SliceError(
                part.name, f"{show_box(part)} was saved, but no rank declares the tensor"
            )
        check_inside(part, tensors[part.name].shape)
        if math.prod(part.sizes):
            by_name[part.name].append(part)
    for name, info in tensors.items():
        _check_tiling(name, info.shape, by_name[name])


def _check_tiling(name: str, shape: Index, parts: Sequence[Boxed]) -> None:
    # Boxes inside the shape, disjoint, whose volumes sum up to its volume: that is a tiling.
    if overlap := _first_overlap(parts):
        raise SliceError(name, f"{show_box(overlap[0])} and {show_box(overlap[1])} overlap")
    covered, wanted = sum(math.prod(part.sizes) for part in parts), math.prod(shape)
    if covered != wanted:
        raise SliceError(
            name, f"{len(parts)} slices cover {covered} of the {wanted} elements of shape {shape}"
        )


def _first_overlap(parts: Sequence[Boxed]) -> tuple[Boxed, Boxed] | None:
    """Sweeps along the axis with most distinct offsets, comparing only what lies abreast."""
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
