"""A lane that several replicas compute: they come to one gradient, and who does not shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic.protocol.faults import flip_bit
from tests.support.data_plane import make_engine
from tests.support.quiet_link import QuietLink
from tests.support.tiny import tiny_train, write_text
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.phases import Phase
from trainer.loop.steps import TrainLoop
from trainer.replication.lanes import deal_lanes
from trainer.replication.replicas import CrossGroup
from trainer.replication.witnesses import plan_witnesses
from trainer.tasks.task import PreparedTask

EVERY, STEPS = 2, 4


@dataclass
class Glitching(QuietLink):
    """Changes a bit of the weights for the first micro-batch of a step, if told to."""

    engine: Engine
    glitch_at: int | None
    seen: dict[int, dict[int, int]] = field(default_factory=dict)
    gradients: list[bytes] = field(default_factory=list)
    flipped: bool = False

    def at_step(self, step: int, phase: Phase) -> None:
        if self.flipped and phase != "backward":
            self.flipped, self.glitch_at = False, None
            flip_bit(self.engine)
        elif phase == "forward" and step == self.glitch_at:
            self.flipped = True
            flip_bit(self.engine)

    def witnessed(self, step: int, digests: Mapping[int, int]) -> bool:
        self.seen[step] = dict(digests)
        return True


@dataclass(frozen=True)
class Case:
    """A layout, and where a glitch is."""

    replicas: int
    lanes: int
    shard: int = 1
    every: int | None = EVERY
    glitch: tuple[int, int] | None = None
    """Position and step."""


def _train(
    place: int, port: int, task: PreparedTask, train: TrainConfig, case: Case, results: Any
) -> None:
    torch.set_num_threads(1)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    position, rank = divmod(place, case.shard)
    engine = make_engine(place, meet, task, train, replicas=case.replicas)
    dealt = deal_lanes(case.lanes, tuple(range(case.replicas)))
    cross = CrossGroup(
        meet,
        f"cross/{rank}",
        lanes=[dealt[replica] for replica in range(case.replicas)],
        total_lanes=case.lanes,
        rank=position,
        device="cpu",
        leave_now=lambda: False,
    )
    glitch_at = case.glitch[1] if case.glitch and (case.glitch[0], 0) == (position, rank) else None
    link = Glitching(engine, glitch_at)
    loop = TrainLoop(
        engine,
        cross,
        engine.make_sums(case.lanes, case.replicas),
        lanes=dealt[position],
        progress=Progress(),
        config=LoopConfig(
            lanes=case.lanes,
            save_every=None,
            compare_every=None,
            max_nonfinite_steps=1,
            until=train.steps,
            witness_every=case.every,
        ),
        link=link,
    )
    assert loop.run() == "finished"
    results[place] = link.seen, engine.state.digest(), link.flipped, link.glitch_at
    cross.close()
    del loop, engine, link
    leave_replica_group()


def outcomes(directory: Path, case: Case) -> list[Any]:
    """(digests by step and position, state, no glitch left) of every worker."""
    text = write_text(directory / "text")
    train = tiny_train(
        text, steps=STEPS, global_batch=12, lanes=case.lanes, shard=case.shard, bucket_bytes=4096
    )
    task = train.task.prepare(train, str(directory / "cache"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = case.replicas * case.shard
    with mp.Manager() as manager:
        results = manager.dict()
        arguments = (store.port, task, train, case, results)
        mp.start_processes(_train, args=arguments, nprocs=workers, start_method="forkserver")
        assert all(results[place][2:] == (False, None) for place in range(workers)), "it has fired"
        return [results[place][:2] for place in range(workers)]


@pytest.mark.parametrize(("replicas", "lanes", "shard"), [(2, 3, 1), (3, 3, 1), (2, 2, 2)])
def test_who_computes_the_same_lane_comes_to_the_same_gradient_and_no_bit_changes(
    tmp_path: Path, replicas: int, lanes: int, shard: int
) -> None:
    plain = outcomes(tmp_path / "plain", Case(replicas, lanes, shard, every=None))
    found = outcomes(tmp_path / "drawn", Case(replicas, lanes, shard))
    assert [state for _, state in found] == [state for _, state in plain]
    (seen, _), *others = found
    assert all(other == seen for other, _ in others), "everybody knows the same"
    assert list(seen) == [1, 3]
    for digests in seen.values():
        assert len(digests) == replicas and len(set(digests.values())) == 1
    assert len({min(digests.values()) for digests in seen.values()}) == 2, "of each step another"


def test_a_gradient_that_is_wrong_shows_whose_it_is(tmp_path: Path) -> None:
    """A witness computes the drawn lane first: it is the one that the glitch hits."""
    lanes: list[tuple[int, ...]] = [(0,), (1,), (2,)]
    wrong = drawn(lanes, seed=3).witnesses[0]
    plain = outcomes(tmp_path / "plain", Case(3, 3))
    found = outcomes(tmp_path / "glitch", Case(3, 3, glitch=(wrong, 3)))
    seen, expected = found[0][0], plain[0][0]
    assert seen[1] == expected[1]
    assert [at for at in range(3) if seen[3][at] != expected[3][at]] == [wrong]
    assert [state for _, state in found] == [state for _, state in plain], "it is in no sum"


def drawn(lanes: list[tuple[int, ...]], seed: int, step: int = 3) -> Any:
    found = plan_witnesses(lanes, seed=seed, step=step, every=EVERY)
    assert found is not None
    return found


def test_each_lane_is_drawn_as_often_and_who_has_state_alone_takes_part() -> None:
    lanes: list[tuple[int, ...]] = [(0, 1), (), (2,), (3, 4, 5)]
    plans = [drawn(lanes, 0, step) for step in range(1, 12000, 2)]
    counts = [sum(plan.lane == lane for plan in plans) for lane in range(6)]
    assert min(counts) > 850 and max(counts) < 1150  # a thousand each; 5 standard deviations
    for plan in plans:
        assert plan.lane in lanes[plan.owner]
        assert {plan.owner, *plan.witnesses} == {0, 2, 3}
    assert plan_witnesses(lanes, seed=0, step=2, every=2) is None
    assert plan_witnesses([(0, 1), ()], seed=0, step=1, every=2) is None, "there is nobody else"
    assert plan_witnesses(lanes, seed=0, step=1, every=None) is None
    five: list[tuple[int, ...]] = [(lane,) for lane in range(5)]
    assert all(len(drawn(five, seed).witnesses) == 2 for seed in range(20)), "a majority is enough"
