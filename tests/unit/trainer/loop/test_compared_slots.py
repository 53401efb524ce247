"""Replicas of several workers compare their states: an equal slot does not speak for the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic.protocol.faults import flip_bit
from tests.support.data_plane import make_engine
from tests.support.member import small_task, small_train
from tests.support.quiet_link import QuietLink
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.loop.between_steps import BetweenSteps, shows_agreement
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.phases import Phase
from trainer.replication.replicas import CrossGroup

REPLICAS, SHARD, LANES, STEP = 2, 2, 2, 4


@dataclass
class Noting(QuietLink):
    """Keeps what comparisons showed: whether this worker's slot is equal, and whether all are."""

    told: list[tuple[bool, bool]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    def at_step(self, step: int, phase: Phase) -> None:
        assert step == STEP - 1
        self.phases.append(phase)

    def compared(self, step: int, checksums: list[int | None], confirmed: bool) -> None:
        assert step == STEP
        assert self.phases[-1] == "reduce", "who waits there is not stuck"
        self.told.append((len({one for one in checksums if one is not None}) == 1, confirmed))


def _compare(place: int, port: int, results: Any) -> None:
    train = small_train(STEP, shard=SHARD)
    task = small_task().prepare(train, "")
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    position, rank = divmod(place, SHARD)
    engine = make_engine(place, meet, task, train, replicas=REPLICAS)
    cross = CrossGroup(
        meet,
        f"cross/{rank}",
        lanes=[(0,), (1,)],
        total_lanes=LANES,
        rank=position,
        device="cpu",
        leave_now=lambda: False,
    )
    link = Noting()
    due = BetweenSteps(
        engine,
        cross,
        progress=Progress(step=STEP),
        config=LoopConfig(
            lanes=LANES, save_every=None, compare_every=STEP, max_nonfinite_steps=1, until=STEP
        ),
        link=link,
        samples=8,
        enter=lambda step, phase: None,
    )
    due.compare(has_state=True)
    due.compare(has_state=position == 0)
    if (position, rank) == (1, 1):
        flip_bit(engine)
    due.compare(has_state=True)
    if (position, rank) == (1, 1):
        cross.close()
    else:
        due.compare(has_state=True)
    assert link.phases[-2:] == ["reduce", "after_commit"]
    results[place] = link.told
    cross.close()
    del due, engine
    leave_replica_group()


def test_a_bit_that_flips_in_one_slot_leaves_nothing_confirmed() -> None:
    """The sums that it spoils are equal in all replicas, and so are the other slots."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = REPLICAS * SHARD
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(
            _compare, args=(store.port, results), nprocs=workers, start_method="forkserver"
        )
        told = [results[place] for place in range(workers)]
    whole, alone, flipped = (True, True), (True, False), (False, False)
    assert told[0] == [whole, alone, alone, alone], "it hears of the flip, and of the lost group"
    assert told[1] == [whole, alone, flipped]
    assert told[2] == [alone] * 4, "the second replica does not know"
    assert told[3] == [alone, alone, flipped]


@pytest.mark.parametrize(
    ("checksums", "agree"),
    [
        ([5], True),
        ([5, 5, 5], True),
        ([5, 6, 5], False),
        ([5, None, 5], True),
        ([5, None], False),
        ([None], False),
        ([], False),
    ],
)
def test_one_replica_alone_shows_nothing_while_others_get_their_state(
    checksums: list[int | None], agree: bool
) -> None:
    assert shows_agreement(checksums) is agree
