"""A profiler that stops while keys are on their way round: nothing of that may be among its
records, which one of Gloo's threads would write to after that."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from trainer.parallel.context.ring import Ring, ring_attention


def attend(rank: int, port: int, results: Any) -> None:
    """One process of two."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    ring = Ring(dist.group.WORLD.group_name)
    query, key, value = torch.randn(3, 1, 2, 8, 4).unbind()
    with profile(activities=[ProfilerActivity.CPU]) as running:
        ring_attention(query, key, value, 0.5, ring.key)
    results[rank] = {event.name for event in running.events() or ()}
    dist.destroy_process_group()


def test_a_profile_holds_nothing_of_what_goes_round() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(attend, (store.port, results), nprocs=2, start_method="spawn")
        for rank in range(2):
            names = results[rank]
            assert "elastic::ring_attention" in names
            assert not [name for name in names if name.startswith("gloo:")]
