"""Who does not evaluate waits for those who do, longer than for a sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from trainer.backend.rendezvous import Rendezvous
from trainer.errors import CrossGroupLost
from trainer.replication.replicas import CrossGroup

TIMEOUT_S = 2.0


def groups_of_two(leave_now: Callable[[], bool]) -> tuple[list[CrossGroup], dist.TCPStore]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=TIMEOUT_S)

    def make(rank: int) -> CrossGroup:
        return CrossGroup(
            meet,
            "two",
            lanes=[(0,), (1,)],
            total_lanes=2,
            rank=rank,
            device="cpu",
            leave_now=leave_now,
        )

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2))), store


def test_it_has_no_time_limit() -> None:
    (early, late), _store = groups_of_two(lambda: False)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(early.meet)
        time.sleep(1.5 * TIMEOUT_S)  # the evaluation
        assert not waits.done()
        late.meet()
        waits.result(TIMEOUT_S)
        added = threads.submit(early.sum, torch.ones(1))
        assert late.sum(torch.ones(1)).item() == added.result().item() == 2
    for group in (early, late):
        group.close()


def test_a_call_ends_it() -> None:
    called = threading.Event()
    (early, late), _store = groups_of_two(called.is_set)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(early.meet)
        called.set()
        with pytest.raises(CrossGroupLost):
            waits.result(TIMEOUT_S)
    late.close()
