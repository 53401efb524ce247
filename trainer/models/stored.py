"""Where the numbers of a parameter lie in the files of a Hugging Face model.

A directory may hold a parameter under another name, or in parts: transformers has all experts of a
layer in one parameter, and writes a tensor for each. Its own table of conversions says what goes
where. Here a parameter's place is a stored tensor, or places stacked or joined; any box of it is
read without the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

if TYPE_CHECKING:
    from torch import nn

Index = tuple[int, ...]
Stored = Callable[[str], Any]
"""A stored tensor by its name, as safetensors' slice."""


class Place(Protocol):
    """Where a parameter lies."""

    def names(self) -> Iterator[str]:
        """Of the stored tensors that have a part in it."""
        ...

    def shape(self, stored: Stored) -> Index:
        """Raises ValueError for parts that do not fit together."""
        ...

    def read(self, stored: Stored, offsets: Index, sizes: Index) -> torch.Tensor:
        """A box of one or more numbers."""
        ...


@dataclass(frozen=True)
class Whole:
    """A stored tensor as it is."""

    name: str
    """Its name in the files."""

    def names(self) -> Iterator[str]:
        """See Place."""
        yield self.name

    def shape(self, stored: Stored) -> Index:
        """See Place."""
        return tuple(stored(self.name).get_shape())

    def read(self, stored: Stored, offsets: Index, sizes: Index) -> torch.Tensor:
        """See Place."""
        where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        box: torch.Tensor = stored(self.name)[where]
        return box


@dataclass(frozen=True)
class _OfParts:
    """Places that are put together."""

    parts: Sequence[Place]
    """In order."""
    dim: int
    """Along which dimension."""

    def names(self) -> Iterator[str]:
        """See Place."""
        for part in self.parts:
            yield from part.names()


class Stacked(_OfParts):
    """Places of one shape, along a dimension that they do not have."""

    def shape(self, stored: Stored) -> Index:
        """See Place."""
        shapes = {part.shape(stored) for part in self.parts}
        if len(shapes) > 1:
            raise ValueError(f"its parts have several shapes: {sorted(shapes)}")
        (shape,) = shapes
        return (*shape[: self.dim], len(self.parts), *shape[self.dim :])

    def read(self, stored: Stored, offsets: Index, sizes: Index) -> torch.Tensor:
        """See Place."""
        first, count = offsets[self.dim], sizes[self.dim]
        offsets, sizes = _put(offsets, self.dim), _put(sizes, self.dim)
        parts = self.parts[first : first + count]
        return torch.stack([part.read(stored, offsets, sizes) for part in parts], self.dim)


class Joined(_OfParts):
    """Places one after the other, along a dimension that they have."""

    def shape(self, stored: Stored) -> Index:
        """See Place."""
        shapes = [part.shape(stored) for part in self.parts]
        if len({_put(shape, self.dim) for shape in shapes}) > 1:
            raise ValueError(f"its parts do not fit together: {shapes}")
        return _put(shapes[0], self.dim, sum(shape[self.dim] for shape in shapes))

    def read(self, stored: Stored, offsets: Index, sizes: Index) -> torch.Tensor:
        """See Place."""
        found, start = [], 0
        first, end = offsets[self.dim], offsets[self.dim] + sizes[self.dim]
        for part in self.parts:
            stop = start + part.shape(stored)[self.dim]
            low, high = max(first, start), min(end, stop)
            if low < high:
                within = _put(offsets, self.dim, low - start), _put(sizes, self.dim, high - low)
                found.append(part.read(stored, *within))
            start = stop
        return torch.cat(found, self.dim)


def _put(numbers: Index, dim: int, *value: int) -> Index:
    """The numbers with another one, or none, for dimension `dim`."""
    return (*numbers[:dim], *value, *numbers[dim + 1 :])


def plan_places(
    model: nn.Module, names: Iterable[str]
) -> tuple[dict[str, Place], dict[str, list[str]]]:
    """Finds every parameter and buffer of a model in files, as transformers does.

    Args:
        model: it.
        names: of the stored tensors.

    Returns:
        Places by the model's names; and those that the files hold in a form that cannot be read by
        boxes, with the operations that transformers would do.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    held = model.state_dict()
    prefix = getattr(model, "base_model_prefix", None) or None
    transforms: list[Any] = get_model_conversion_mapping(cast(Any, model))
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in transforms if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    places: dict[str, Place] = {}
    parts: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names, key=dot_natural_key):  # experts in the order of their numbers
        target, pattern = rename_source_key(name, renamings, converters, prefix, held)
        if target not in held and name in held:  # as the model has it in memory
            target, pattern = name, None
        if pattern is None:
            places.setdefault(target, Whole(name))
        else:
            parts[target][pattern].append(Whole(name))
    others: dict[str, list[str]] = {}
    for target, given in parts.items():
        converter = by_pattern[next(iter(given))]
        place = _built(converter, given)
        if place is not None:
            places[target] = place
        else:
            others[target] = [type(operation).__name__ for operation in converter.operations]
    return places, others


def _built(converter: Any, given: dict[str, list[Place]]) -> Place | None:
    """What a conversion makes of the parts of each of its patterns; None where it does what no box
    of a place can be."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    for operation in converter.operations:
        if type(operation) is MergeModulelist:
            given = {pattern: [Stacked(all_, operation.dim)] for pattern, all_ in given.items()}
        elif type(operation) is Concatenate:
            ordered = [
                part for pattern in converter.source_patterns for part in given.get(pattern, ())
            ]
            given = {converter.target_patterns[0]: [Joined(ordered, operation.dim)]}
        else:
            return None
    ((place, *more), *rest) = given.values()
    return None if more or rest else place
