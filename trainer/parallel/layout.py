"""Layout arithmetic: ranks, slots, and the box of a full tensor that a worker holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place in the layout."""

    replica: int
    """Index of the replica."""
    shard: int
    """Position along the sharded data-parallel dimension."""
    tensor: int
    """Position along the tensor-parallel dimension, the fastest-varying one."""

    def __str__(self) -> str:
        return f"replica {self.replica} shard {self.shard} tensor {self.tensor}"


def slot_of(replica: int, rank: int, tensor_degree: int) -> Slot:
    """The slot of `rank` within a replica; tensor peers have neighbouring ranks (one node's
    NVLink)."""
    return Slot(replica=replica, shard=rank // tensor_degree, tensor=rank % tensor_degree)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of part `index` when `torch.chunk` cuts `size` into `parts`.

    Chunks are ceil(size / parts) long, so the last ones may be short or empty.
    """
    length = -(-size // parts)
    start = min(index * length, size)
    return start, min(length, size - start)


def local_box(
    shape: tuple[int, ...],
    *,
    tensor_dim: int | None,
    tensor_degree: int,
    tensor_index: int,
    shard_degree: int,
    shard_index: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of a full parameter that one worker holds.

    Tensor parallelism cuts `tensor_dim` first (None: replicated over the tensor ranks); FSDP2 then
    cuts dimension 0 of what is left.

    Returns:
        (offsets, sizes), one number per dimension.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    if tensor_dim is not None:
        offsets[tensor_dim], sizes[tensor_dim] = chunk(
            shape[tensor_dim], tensor_degree, tensor_index
        )
    start, length = chunk(sizes[0], shard_degree, shard_index)
    offsets[0] += start
    sizes[0] = length
    return tuple(offsets), tuple(sizes)
