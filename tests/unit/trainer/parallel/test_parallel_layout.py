"""Layout arithmetic against `torch.chunk`, which FSDP2 and DTensor cut with."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.parallel.layout import ParallelDims, Slot, chunk, local_box


def test_tensor_peers_are_neighbours() -> None:
    dims = ParallelDims(shard=2, tensor=2)
    slots = [Slot(replica=7, rank=rank, dims=dims) for rank in range(4)]
    assert [(slot.shard, slot.tensor) for slot in slots] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [slot.fsdp for slot in slots] == [0, 0, 1, 1]


def test_positions_are_those_of_a_grid() -> None:
    dims = ParallelDims(shard=2, others=(("context", 3), ("more", 2)), tensor=2)
    grid = itertools.product(range(2), range(3), range(2), range(2))
    assert dims.workers == 24
    for rank, (shard, context, more, tensor) in enumerate(grid):
        slot = Slot(replica=0, rank=rank, dims=dims)
        assert slot.coordinates == {
            "shard": shard, "context": context, "more": more, "tensor": tensor
        }  # fmt: skip
        assert (slot.shard, slot.tensor) == (shard, tensor)
        assert slot.part == context * 2 + more
        assert slot.fsdp == shard * 6 + slot.part


def test_two_levels_seat_what_shares_samples_together_and_shards_apart() -> None:
    """Workers are named by node, then by place there."""
    dims = ParallelDims(shard=6, tensor=2, nodes=3)
    assert dims.together == 4
    assert dims.by_rank([f"{node}{place}" for node in "abc" for place in range(4)]) == (
        "a0", "a1", "b0", "b1", "c0", "c1", "a2", "a3", "b2", "b3", "c2", "c3",
    )  # fmt: skip
    parts = ParallelDims(shard=4, others=(("context", 2),), nodes=2)
    assert parts.by_rank([f"{node}{place}" for node in "ab" for place in range(4)]) == (
        "a0", "a1", "b0", "b1", "a2", "a3", "b2", "b3",
    )  # fmt: skip


def test_a_flat_layout_is_seated_node_by_node() -> None:
    dims = ParallelDims(shard=4, tensor=2)
    assert dims.together == 2
    assert dims.by_rank("abcdefgh") == tuple("abcdefgh")


def test_a_slot_reads_like_a_place() -> None:
    dims = ParallelDims(shard=3, tensor=4)
    assert str(Slot(replica=1, rank=11, dims=dims)) == "replica 1 shard 2 tensor 3"
    assert str(dims) == "shard 3 x tensor 4"


@settings(deadline=None)
@given(size=st.integers(1, 50), parts=st.integers(1, 12))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    expected = [piece.tolist() for piece in torch.arange(size).chunk(parts)]
    expected += [[]] * (parts - len(expected))
    found = [chunk(size, parts, index) for index in range(parts)]
    assert [list(range(start, start + length)) for start, length in found] == expected


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], int | None, int, int]:
    """(shape, tensor dimension, tensor degree, shard degree)."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    tensor_dim = draw(st.none() | st.integers(0, len(shape) - 1))
    return shape, tensor_dim, draw(st.integers(1, 4)), draw(st.integers(1, 4))


@settings(deadline=None)
@given(layout=layouts())
def test_a_box_is_the_chunk_of_a_chunk(
    layout: tuple[tuple[int, ...], int | None, int, int],
) -> None:
    shape, tensor_dim, tensor, shard = layout
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for t, s in itertools.product(range(tensor), range(shard)):
        slot = Slot(replica=0, rank=s * tensor + t, dims=ParallelDims(shard=shard, tensor=tensor))
        offsets, sizes = local_box(shape, slot, tensor_dim=tensor_dim)
        box = full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        expected = nth_chunk(nth_chunk(full, tensor, t, tensor_dim), shard, s, 0)
        assert box.tolist() == expected.tolist()
        assert box.shape == sizes


def nth_chunk(tensor: torch.Tensor, parts: int, index: int, dim: int | None) -> torch.Tensor:
    """Part `index` of `torch.chunk`, an empty one where there are fewer; `dim` None: all of it."""
    if dim is None:
        return tensor
    pieces = tensor.chunk(parts, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)
