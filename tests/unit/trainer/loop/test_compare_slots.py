"""A wrong bit in one slot of a replica: the workers of all its slots know that not all is alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic.protocol.faults import flip_bit
from tests.support.data_plane import make_engine
from tests.support.fabric import GLOO, FabricGroup
from tests.support.member import small_task, small_train
from tests.support.quiet_link import QuietLink
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.loop.between_steps import BetweenSteps
from trainer.loop.link import LoopConfig, Progress

WRONG = (1, 1)
"""Replica and rank of the worker whose weights change."""


class Heard(QuietLink):
    """Keeps what was compared."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def compared(self, step: int, checksums: list[int | None], *, alike: bool) -> None:
        """See Link. Whether this slot's are equal, and whether all are."""
        self.seen.append((len(set(checksums)) == 1, alike))


def compare(number: int, port: int, results: Any) -> None:
    """One process of two replicas of two: compares before and after."""
    torch.set_num_threads(1)
    replica, rank = divmod(number, 2)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    engine = make_engine(number, meet, small_task(), small_train(1, shard=2), replicas=2)
    cross = FabricGroup(
        GLOO,
        meet,
        f"cross/{rank}",
        lanes=[(0,), (1,)],
        total_lanes=2,
        rank=replica,
        leave_now=lambda: False,
    )
    link = Heard()
    due = BetweenSteps(
        engine,
        cross,
        progress=Progress(),
        config=LoopConfig(
            lanes=2, save_every=None, compare_every=1, max_nonfinite_steps=1, until=1
        ),
        link=link,
        samples=1,
        enter=lambda step, phase: None,
    )
    due.compare(has_state=True, in_replica=True)
    if (replica, rank) == WRONG:
        flip_bit(engine)
    due.compare(has_state=True, in_replica=True)
    results[replica, rank] = link.seen
    cross.close()
    leave_replica_group()


def test_all_workers_of_a_replica_know_of_a_slot_that_differs() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(compare, args=(store.port, results), nprocs=4, start_method="forkserver")
        found = dict(results)
    for (_, rank), (before, after) in found.items():
        assert before == (True, True)
        assert after == (rank != WRONG[1], False)
