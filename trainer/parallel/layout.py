"""Layout arithmetic: the dimensions of a replica's mesh, slots in it, and the box of a full tensor
that a worker holds. Pure.

    shard     its workers take different samples, and each holds a part of every parameter
    others    theirs take the same samples, and each a part of the work on them (`dims.MeshDim`);
              parameters are sharded over them too
    tensor    its workers take the same samples, and each holds a part of what the model's
              tensor-parallel plan cuts
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The mesh of one replica: its dimensions, the slowest-varying one first."""

    shard: int = 1
    """Sharded data parallel degree."""
    others: tuple[tuple[str, int], ...] = ()
    """Name and degree of the dimensions between shard and tensor."""
    tensor: int = 1
    """Tensor parallel degree; tensor peers have neighbouring ranks (one node's NVLink)."""
    nodes: int = 1
    """Nodes that one replica is meant to be on, a divisor of `shard`: what FSDP2 sends goes over
    them in two levels. 1: flat. What counts is this number, never where workers happen to be."""
    regather: int | None = None
    """Workers, neighbours, over which parameters lie from a block's forward to its backward; None:
    all that they are sharded over."""

    @property
    def degrees(self) -> dict[str, int]:
        """Every dimension's degree by its name, in the mesh's order."""
        return {"shard": self.shard, **dict(self.others), "tensor": self.tensor}

    @property
    def workers(self) -> int:
        """Workers in one replica."""
        return math.prod(self.degrees.values())

    @property
    def fsdp(self) -> int:
        """Workers that FSDP2 shards parameters over: all but tensor peers."""
        return self.shard * self.parts

    @property
    def regathered(self) -> int:
        """Workers over which parameters lie from a block's forward to its backward."""
        return self.regather or self.fsdp

    @property
    def regathers_partly(self) -> bool:
        """Whether parameters lie over some of the workers then: not whole on each, nor over all."""
        return 1 < self.regathered < self.fsdp

    @property
    def parts(self) -> int:
        """Workers that one sample's work is divided over, tensor peers not counted."""
        return math.prod(degree for _, degree in self.others)

    @property
    def together(self) -> int:
        """Workers, neighbours on the network, that should be on one node."""
        return self.tensor if self.nodes == 1 else self.workers // self.nodes

    @property
    def unit(self) -> int:
        """Workers, neighbours in rank, that share samples."""
        return self.parts * self.tensor

    def by_rank(self, seat: Sequence[_T]) -> tuple[_T, ...]:
        """The workers of a replica by rank in it.

        The shard positions of a node are no neighbours: position local * nodes + node is on `node`.
        So what the workers of one local position hold is one stretch of a gathered buffer
        (`two_level.py`). What shares samples or parameters stays together.

        Args:
            seat: they, node by node.
        """
        unit, here = self.unit, self.shard // self.nodes
        starts = (
            (node * here + local) * unit for local in range(here) for node in range(self.nodes)
        )
        return tuple(worker for start in starts for worker in seat[start : start + unit])

    def __str__(self) -> str:
        return " x ".join(f"{name} {degree}" for name, degree in self.degrees.items())


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place in the layout."""

    replica: int
    """Index of the replica."""
    rank: int
    """Rank in it."""
    dims: ParallelDims
    """The replica's mesh."""

    @property
    def coordinates(self) -> dict[str, int]:
        """Position along every dimension, by its name."""
        found, rest = {}, self.rank
        for name, degree in reversed(self.dims.degrees.items()):
            rest, found[name] = divmod(rest, degree)
        return dict(reversed(found.items()))

    @property
    def tensor(self) -> int:
        """Position among those that hold parts of the same parameters' cuts."""
        return self.rank % self.dims.tensor

    @property
    def fsdp(self) -> int:
        """Position among those that FSDP2 shards parameters over: all but tensor peers."""
        return self.rank // self.dims.tensor

    @property
    def part(self) -> int:
        """Position among those that share the work on the same samples, tensor peers aside."""
        return self.fsdp % self.dims.parts

    @property
    def shard(self) -> int:
        """Position among those that take different samples."""
        return self.fsdp // self.dims.parts

    def __str__(self) -> str:
        where = (f"{name} {position}" for name, position in self.coordinates.items())
        return " ".join([f"replica {self.replica}", *where])


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of part `index` when `torch.chunk` cuts `size` into `parts`.

    Chunks are ceil(size / parts) long, so the last ones may be short or empty.
    """
    length = -(-size // parts)
    start = min(index * length, size)
    return start, min(length, size - start)


def local_box(
    shape: tuple[int, ...], slot: Slot, *, tensor_dim: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of a full parameter that the worker in `slot` holds.

    Tensor parallelism cuts `tensor_dim` first (None: replicated over the tensor ranks); FSDP2 then
    cuts dimension 0 of what is left.

    Returns:
        (offsets, sizes), one number per dimension.
    """
    dims, offsets, sizes = slot.dims, [0] * len(shape), list(shape)
    if tensor_dim is not None:
        offsets[tensor_dim], sizes[tensor_dim] = chunk(shape[tensor_dim], dims.tensor, slot.tensor)
    start, length = chunk(sizes[0], dims.fsdp, slot.fsdp)
    offsets[0] += start
    sizes[0] = length
    return tuple(offsets), tuple(sizes)
