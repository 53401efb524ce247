"""Two-level collectives over Gloo: the gather is the flat one's, bit for bit; the sum is the one
that the module describes, worked out here in one process."""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.layout import ParallelDims
from trainer.parallel.peers import plan_rounds, plan_stretches
from trainer.parallel.two_level import TwoLevels

SHARD = 37
"""Numbers in one; no power of two."""
LAYOUTS = [
    (2, 2, 1, 8), (3, 2, 1, 8), (4, 2, 1, 8), (4, 2, 1, 2), (4, 2, 1, 1), (8, 1, 1, 3),
    (1, 3, 1, 8), (2, 1, 2, 8), (2, 2, 2, 8), (4, 1, 2, 1),
]  # fmt: skip
"""Nodes, local places, parts, rounds."""
MOST = 8
DTYPES = (torch.float32, torch.bfloat16)


@given(nodes=st.integers(1, 300), most=st.integers(1, 9))
def test_rounds_hold_every_distance_once(nodes: int, most: int) -> None:
    rounds = plan_rounds(nodes, most)
    assert [d for each in rounds for d in each] == [*range(nodes)]
    assert all(rounds) and len(rounds) <= max(1, min(most, nodes - 1))
    sizes = [len([d for d in each if d]) for each in rounds]
    assert max(sizes) - min(sizes) <= 1


@given(first=st.integers(-50, 50), nodes=st.integers(1, 20), data=st.data())
def test_stretches_hold_the_nodes_in_order(first: int, nodes: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, nodes))
    found = [node for part in plan_stretches(first, count, nodes) for node in range(nodes)[part]]
    assert found == [(first + i) % nodes for i in range(count)]


def test_a_flat_layout_has_no_levels() -> None:
    assert TwoLevels.of(ParallelDims(shard=4)) is None
    found = TwoLevels.of(ParallelDims(shard=4, others=(("context", 3),), nodes=2))
    assert found == TwoLevels(nodes=2, parts=3)


@functools.cache
def addends(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings; sums of such numbers depend on their order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size * SHARD, generator=generator).exp().to(dtype)


def described_sum(rank: int, nodes: int, locals_: int, parts: int, dtype: torch.dtype) -> Any:
    """The sum of a rank's shard, as the module says: in each node by rank from the left; the own
    node's, then those of the nodes before it, going down."""
    size = nodes * locals_ * parts
    node = rank // parts % nodes

    def addend(of: int) -> torch.Tensor:
        return addends(of, size, dtype)[rank * SHARD : (rank + 1) * SHARD]

    def of_node(one: int) -> torch.Tensor:
        ranks = [r for r in range(size) if r // parts % nodes == one]
        return functools.reduce(torch.add, map(addend, ranks))

    return functools.reduce(torch.add, [of_node((node - i) % nodes) for i in range(nodes)])


def work(rank: int, port: int, results: Any) -> None:
    """Both collectives in each layout that has a place for this process."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MOST)
    for nodes, locals_, parts, rounds in LAYOUTS:
        size = nodes * locals_ * parts
        group = dist.new_group([*range(size)])
        if rank < size:
            levels = TwoLevels(nodes=nodes, parts=parts, rounds=rounds)
            for dtype in DTYPES:
                outcome = both_collectives(levels, group, rank, size, dtype)
                results[nodes, locals_, parts, rounds, rank, dtype] = outcome
    dist.destroy_process_group()


def both_collectives(
    levels: TwoLevels, group: Any, rank: int, size: int, dtype: torch.dtype
) -> tuple[bool, torch.Tensor]:
    """Whether the gathered buffer is the flat one's, and the sum of this rank's shard."""
    whole = torch.full((size * SHARD,), float("nan"), dtype=dtype)
    own = whole[rank * SHARD : (rank + 1) * SHARD]
    own.copy_(addends(rank, size, dtype)[:SHARD])
    flat = torch.empty_like(whole)
    dist.all_gather([*flat.split(SHARD)], own.clone(), group=group)
    levels.all_gather(whole, group)
    total = torch.empty(SHARD, dtype=dtype)
    levels.reduce_scatter(total, addends(rank, size, dtype).clone(), group)
    return torch.equal(whole, flat), total


multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "trainer.parallel.two_level"])


@pytest.fixture(scope="module")
def found() -> dict[Any, tuple[bool, torch.Tensor]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        arguments = (store.port, results)
        mp.start_processes(work, args=arguments, nprocs=MOST, start_method="forkserver")
        return dict(results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nodes", "locals_", "parts", "rounds"), LAYOUTS)
def test_both_collectives(
    found: Any, nodes: int, locals_: int, parts: int, rounds: int, dtype: torch.dtype
) -> None:
    for rank in range(nodes * locals_ * parts):
        same, total = found[nodes, locals_, parts, rounds, rank, dtype]
        assert same, rank
        assert torch.equal(total, described_sum(rank, nodes, locals_, parts, dtype)), rank
