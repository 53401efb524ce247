"""Collectives across replicas fail on one member each, in both columns of two replicas of two.

Then the peer in each column waits for one that waits inside its replica for the peer in the other:
a cycle that only a call ends.
"""

from __future__ import annotations

from typing import Any

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
from trainer.replication.replicas import CrossGroup, Flight
from trainer.replication.step_commit import Commit

LANES, STEPS = [(0,), (1,)], 3
ALONE = {(0, 0), (1, 1)}
"""Replica and rank of those whose collective fails."""
TIMEOUT_S = 60.0


class Link(QuietLink):
    """Hears through the store that a generation is over, and says so there."""

    def __init__(self, store: dist.TCPStore) -> None:
        self.store, self.generation = store, 0

    def leave_now(self) -> bool:
        """See Link."""
        return self.store.check([f"fault {self.generation}"])

    def cross_lost(self, reason: str) -> None:
        """As the coordinator, which calls all away."""
        self.store.set(f"fault {self.generation}", "")

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""


class FailsAlone(CrossGroup):
    """Its first collective that is waited for comes through, and fails here all the same."""

    def poll(self, flight: Flight) -> None:
        """See CrossGroup."""
        super().poll(flight)
        raise self._lose(RuntimeError("a connection was reset"))


def train(number: int, port: int, results: Any) -> None:
    """One process: a generation that fails, and the one after it."""
    torch.set_num_threads(1)
    replica, rank = divmod(number, 2)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    link = Link(dist.TCPStore("127.0.0.1", port))
    config = small_train(STEPS, shard=2)
    engine = make_engine(number, meet, small_task(), config, replicas=2)
    assert len(engine.layout.buckets) > 1
    sums, progress = engine.make_sums(2, 2), Progress()
    outcomes = []
    for make in (FailsAlone if (replica, rank) in ALONE else CrossGroup, CrossGroup):
        link.generation += 1
        cross = make(
            meet,
            f"cross/{link.generation}/{rank}",
            lanes=LANES,
            total_lanes=2,
            rank=replica,
            device="cpu",
            leave_now=link.leave_now,
            on_lost=link.cross_lost,
        )
        loop = TrainLoop(
            engine,
            cross,
            sums,
            lanes=LANES[replica],
            progress=progress,
            config=LoopConfig(
                lanes=2,
                save_every=None,
                compare_every=None,
                max_nonfinite_steps=1,
                until=STEPS,
            ),
            link=link,
        )
        outcomes.append(loop.run())
        cross.close()
    results[replica, rank] = outcomes, progress.step, engine.state.digest()
    leave_replica_group()


def test_two_columns_that_fail_on_one_side_each_leave_nobody_waiting() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(train, args=(store.port, results), nprocs=4, start_method="forkserver")
        found = dict(results)
    for outcomes, step, _ in found.values():
        assert (outcomes, step) == (["fault", "finished"], STEPS)
    assert store.check(["fault 1"]) and not store.check(["fault 2"])
    for rank in range(2):
        assert found[0, rank][2] == found[1, rank][2]
