"""One replica of two workers; what is left of another one follows in the column of the first.

A fault is called in a step that the second worker, alone in its column, has added up already.
Both have to come to the same answer to the question which lanes are computed again: else one waits
in a forward that the other does not make.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.data_plane import make_engine
from tests.support.member import small_task, small_train
from tests.support.quiet_link import QuietLink
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.steps import TrainLoop
from trainer.replication.replicas import CrossGroup
from trainer.replication.step_commit import Commit

STEPS, TIMEOUT_S = 2, 60.0
CALLED = "a fault is called"
FOLLOWER = 2
"""Number of its process."""


class Link(QuietLink):
    """Hears through the store that the first generation is over."""

    def __init__(self, store: dist.TCPStore) -> None:
        self.store, self.generation = store, 0

    def leave_now(self) -> bool:
        """See Link."""
        return self.generation == 1 and self.store.check([CALLED])

    def cross_lost(self, reason: str) -> None:
        """As the coordinator, which calls all away."""
        self.store.set(CALLED, "")

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""


def cross_group(meet: Rendezvous, link: Link, *, column: int, size: int, rank: int) -> CrossGroup:
    """The first of a column has all lanes."""
    return CrossGroup(
        meet,
        f"cross/{link.generation}/{column}",
        lanes=[(0, 1), *[()] * (size - 1)],
        total_lanes=2,
        rank=rank,
        device="cpu",
        leave_now=link.leave_now,
        on_lost=link.cross_lost,
    )


def follow(meet: Rendezvous, link: Link) -> None:
    """Meets the first worker, and is gone before the sum."""
    link.generation = 1
    cross_group(meet, link, column=0, size=2, rank=1).close()


def train(number: int, port: int, lanes_on_device: int | None, results: Any) -> None:
    """One process: the generation with a follower, and the one after it."""
    torch.set_num_threads(1)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    link = Link(dist.TCPStore("127.0.0.1", port))
    if number == FOLLOWER:
        follow(meet, link)
        return
    engine = make_engine(number, meet, small_task(), small_train(STEPS, shard=2), replicas=1)
    sums, progress, outcomes = engine.make_sums(2, 1), Progress(), []
    sums.most = lanes_on_device
    for followers in ((1, 0), (0, 0)):
        link.generation += 1
        cross = cross_group(meet, link, column=number, size=1 + followers[number], rank=0)
        config = LoopConfig(
            lanes=2, save_every=None, compare_every=None, max_nonfinite_steps=1, until=STEPS
        )
        loop = TrainLoop(
            engine,
            cross,
            sums,
            lanes=(0, 1),
            progress=progress,
            config=config,
            link=link,
            followers=followers,
        )
        outcomes.append(loop.run())
        cross.close()
    results[number] = outcomes, progress.step
    leave_replica_group()


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("lanes_on_device", [None, 1])
def test_all_ranks_compute_the_same_lanes_again(lanes_on_device: int | None) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        arguments = (store.port, lanes_on_device, results)
        mp.start_processes(train, args=arguments, nprocs=3, start_method="forkserver")
        assert dict(results) == {rank: (["fault", "finished"], STEPS) for rank in range(2)}
