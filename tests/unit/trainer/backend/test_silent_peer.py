"""One of a replica of three says nothing, as when its machine is gone, and closes no connection:
the call that says so wakes the others from the collective in which they wait for it. On Gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trainer.backend.groups import (
    abort_groups,
    leave_replica_group,
    make_replica_group,
    replica_connections,
)
from trainer.backend.origin import origin_of
from trainer.backend.rendezvous import Rendezvous
from trainer.parallel.layout import ParallelDims

SILENT = 2
PATIENCE = timedelta(seconds=30)
"""Far less than the group's own timeout."""
SOON_S = 5.0


def make_group(port: int, prefix: str, rank: int, size: int) -> None:
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=300)
    make_replica_group(meet, prefix, rank=rank, dims=ParallelDims(shard=size), device="cpu")
    dist.all_reduce(torch.ones(1))


def hear_a_call(store: dist.TCPStore, *after: str) -> None:
    """Starts a thread that does what a worker's watch does at the call, which comes once all of
    `after` is said."""

    def hear() -> None:
        store.wait([*after], PATIENCE)
        store.set("called", str(time.monotonic()))
        for end in abort_groups(replica=replica_connections()):
            end.result()

    threading.Thread(target=hear, daemon=True).start()


def since_the_call(store: dist.TCPStore) -> float:
    return time.monotonic() - float(store.get("called"))


def wait_or_say_nothing(rank: int, port: int) -> None:
    """Then those that are left make a replica of their own, which a call that comes late leaves
    alone."""
    store, ears = dist.TCPStore("127.0.0.1", port), dist.TCPStore("127.0.0.1", port)
    make_group(port, "replica", rank, 3)
    if rank == SILENT:
        store.wait(["over 0", "over 1"], PATIENCE)
        return
    former = replica_connections()
    hear_a_call(ears, "waiting 0", "waiting 1")
    store.set(f"waiting {rank}", "")
    with pytest.raises(RuntimeError) as woken:
        dist.all_reduce(torch.ones(1))
    assert origin_of(woken.value) == "group"
    del woken  # its frames hold the group
    leave_replica_group()
    noticed_s = since_the_call(store)
    make_group(port, "next", rank, 2)
    for end in abort_groups(replica=former):
        end.result()
    alive = torch.ones(1)
    dist.all_reduce(alive)
    assert (alive.item(), noticed_s < SOON_S) == (2, True), (alive, noticed_s)
    store.set(f"over {rank}", "")
    store.wait(["over 0", "over 1"], PATIENCE)
    leave_replica_group()


def test_a_call_wakes_those_who_wait_for_a_silent_peer() -> None:
    play(wait_or_say_nothing)


def leave_or_say_nothing(rank: int, port: int) -> None:
    """Who has left the step for another fault leaves its group with a collective in flight."""
    store, ears = dist.TCPStore("127.0.0.1", port), dist.TCPStore("127.0.0.1", port)
    make_group(port, "replica", rank, 3)
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
        hear_a_call(ears, "leaving")
        store.set("leaving", "")
        leave_replica_group()
        noticed_s = since_the_call(store)
        store.set("over", "")
        assert noticed_s < SOON_S, noticed_s
    store.wait(["over"], PATIENCE)


def test_a_call_wakes_who_leaves_the_group_of_a_silent_peer() -> None:
    play(leave_or_say_nothing)


def play(body: Callable[[int, int], None]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(body, args=(store.port,), nprocs=3, start_method="forkserver")
