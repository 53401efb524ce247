"""Another replica is lost in the reduce: what becomes of the buffer that the sum goes to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.data_plane import make_engine
from tests.support.member import small_task, small_train
from tests.support.quiet_link import QuietLink
from trainer.backend import groups
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.errors import CrossGroupLost
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.phases import Phase
from trainer.loop.steps import TrainLoop
from trainer.replication.lane_sums import LaneSums
from trainer.replication.reduction import Reduction
from trainer.replication.replicas import CrossGroup

LANES = 4
LATE = 1e6
"""What the other replica sends when nobody waits for it any more."""
TIMEOUT_S = 60


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr("trainer.backend.rendezvous.CONNECTIONS", 4)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=store.port, timeout_s=TIMEOUT_S)
    leave_replica_group()


@dataclass
class Survivor(QuietLink):
    """Is called away once all of its own is on its way, and notes what happens from then on."""

    fault: bool = False
    story: list[str] = field(default_factory=list)

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        if phase == "reduce":
            self.fault = True
            self.story.append("fault")

    def leave_now(self) -> bool:
        """See Link."""
        return self.fault


class Absent:
    """The other replica, which does not come before it is told to.

    Args:
        meet: where the group is made.
        dealt: the lanes of the two.
        length: of a gradient buffer.
        ends: of its buckets.
    """

    def __init__(
        self, meet: Rendezvous, dealt: Sequence[tuple[int, ...]], length: int, ends: Sequence[int]
    ) -> None:
        self._come, self._go = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._act, meet, dealt, length, ends)

    def _act(
        self, meet: Rendezvous, dealt: Sequence[tuple[int, ...]], length: int, ends: Sequence[int]
    ) -> None:
        cross = group(meet, dealt, 1, lambda: False)
        assert self._come.wait(TIMEOUT_S)
        block = {node: torch.full((length,), LATE) for node in cross.blocks[1]}
        Reduction(cross, block, torch.zeros(length), ends, exact=True).start(ends[-1])
        assert self._go.wait(TIMEOUT_S)
        cross.close()

    def come(self) -> None:
        """Sends what the survivor's abandoned collectives wait for, until they have it."""
        self._come.set()
        for _, flights in groups._abandoned:
            for flight in flights:
                flight.work.wait()
        self.go()

    def go(self) -> None:
        """Ends."""
        self._come.set()
        self._go.set()
        self._done.result(TIMEOUT_S)
        self._pool.shutdown()


def group(
    meet: Rendezvous, dealt: Sequence[tuple[int, ...]], rank: int, leave_now: Any
) -> CrossGroup:
    return CrossGroup(
        meet,
        "cross",
        lanes=dealt,
        total_lanes=sum(map(len, dealt)),
        rank=rank,
        device="cpu",
        leave_now=leave_now,
    )


def engine_at(meet: Rendezvous, lane_buffers: int | None = None) -> Engine:
    train = replace(small_train(4), lane_buffers=lane_buffers)
    return make_engine(0, meet, small_task(), train, replicas=2)


def loop_of(
    engine: Engine, cross: CrossGroup, sums: LaneSums, lanes: tuple[int, ...], link: Any
) -> TrainLoop:
    config = LoopConfig(
        lanes=LANES, save_every=None, compare_every=None, max_nonfinite_steps=1, until=4
    )
    return TrainLoop(
        engine, cross, sums, lanes=lanes, progress=Progress(), config=config, link=link
    )


def lose_the_other(
    meet: Rendezvous, dealt: Sequence[tuple[int, ...]], lane_buffers: int | None = None
) -> tuple[Engine, LaneSums, Absent, Survivor]:
    """A step whose reduce the other replica does not come to."""
    engine, link = engine_at(meet, lane_buffers), Survivor()
    sums = engine.make_sums(LANES, 2)
    absent = Absent(meet, dealt, engine.gradient.numel(), engine.layout.buckets)
    cross = group(meet, dealt, 0, link.leave_now)
    assert loop_of(engine, cross, sums, dealt[0], link).try_step() is None
    with pytest.raises(CrossGroupLost, match="left for a regroup"):
        cross.check()
    return engine, sums, absent, link


PAIRS, FIRST_ALONE = [(0, 1), (2, 3)], [(0,), (1, 2, 3)]


def expected(meet: Rendezvous, lanes: int = LANES) -> torch.Tensor:
    """The sum of all lanes, computed by one replica that nothing happens to."""
    engine = engine_at(meet)
    alone = [tuple(range(lanes))]
    loop = loop_of(
        engine,
        group(meet, alone, 0, lambda: False),
        engine.make_sums(lanes, 1),
        alone[0],
        QuietLink(),
    )
    assert loop.try_step() is not None
    leave_replica_group()
    return engine.gradient[: engine.layout.count].clone()


def go_on_alone(meet: Rendezvous, engine: Engine, sums: LaneSums) -> torch.Tensor:
    """The sum of all lanes by the survivor, which begins the step again."""
    alone = [tuple(range(LANES))]
    cross = group(meet, alone, 0, lambda: False)
    assert loop_of(engine, cross, sums, alone[0], QuietLink()).try_step() is not None
    return engine.gradient[: engine.layout.count]


def test_what_an_abandoned_collective_of_gloo_writes_is_in_nobodys_way(meet: Rendezvous) -> None:
    total = expected(meet)
    engine, sums, absent, _ = lose_the_other(meet, PAIRS)
    new, kept = engine.gradient, {node: block.clone() for node, block in sums.blocks.items()}
    abandoned = [*groups._abandoned]
    old = [buffer for _, flights in groups._abandoned for f in flights for buffer in f.buffers]
    before = [buffer.clone() for buffer in old]
    absent.come()
    groups._abandoned[:] = abandoned  # the other one's leaving, in this process, has freed them
    assert any((buffer == LATE).any() for buffer in old), "they should have written"
    assert not all(map(torch.equal, old, before))
    assert all(leaf.grad is not None for leaf in engine._leaves)
    assert (new == 0).all() and all(torch.equal(sums.blocks[node], kept[node]) for node in kept)
    assert set(sums.stats) == {0, 1}
    assert torch.equal(go_on_alone(meet, engine, sums), total)
    assert engine.gradient is new
    assert abandoned and not groups._abandoned, "an old gradient stays in memory"


def test_lanes_of_the_lost_replica_wait_on_the_host(meet: Rendezvous) -> None:
    """As on a GPU: the worker takes no more buffers on the device than it had."""
    total = expected(meet)
    engine, sums, absent, _ = lose_the_other(meet, FIRST_ALONE, lane_buffers=1)
    absent.come()
    assert torch.equal(go_on_alone(meet, engine, sums), total)
    assert not sums._free and len(sums._free_on_host) == 2


def test_a_lane_that_nothing_was_written_over_stays(meet: Rendezvous) -> None:
    """A single lane is sent from where the sum goes, and what arrives lies elsewhere."""
    total = expected(meet)
    engine, sums, absent, _ = lose_the_other(meet, FIRST_ALONE)
    gradient, lane = engine.gradient, engine.gradient.clone()
    assert sums.blocks[0, 1] is gradient
    absent.come()
    assert torch.equal(gradient, lane)
    cross = group(meet, [tuple(range(LANES))], 0, lambda: False)
    loop = loop_of(engine, cross, sums, (0, 1, 2, 3), QuietLink())
    assert sums.begin(0, (0, 1, 2, 3), gradient, alone=True) == [1, 2, 3]
    assert loop.try_step() is not None
    assert torch.equal(engine.gradient[: engine.layout.count], total)


class Allocations(TorchDispatchMode):
    """Notes in a story each tensor that is made."""

    def __init__(self, story: list[str]) -> None:
        super().__init__()
        self._story = story

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(value) for value in args}
        if isinstance(result, torch.Tensor) and not result._is_view() and id(result) not in given:
            self._story.append(f"{func} of {result.numel()}")
        return result


def test_on_nccl_nothing_is_allocated_before_the_abort_and_no_second_gradient_after_it(
    meet: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's abort ends what was under way: `abandon` says so. The streams of a CPU are empty."""
    story: list[str] = []

    def abort(group: Any, in_flight: list[Any]) -> bool:
        story.append("abort")
        groups.abandon(group, in_flight)
        return True

    monkeypatch.setattr("trainer.replication.replicas.abandon", abort)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: story.append("drain"))
    engine = engine_at(meet)
    gradient, link = engine.gradient, Survivor(story=story)
    sums = engine.make_sums(LANES, 2)
    absent = Absent(meet, PAIRS, gradient.numel(), engine.layout.buckets)
    cross = group(meet, PAIRS, 0, link.leave_now)
    with Allocations(story):
        assert loop_of(engine, cross, sums, PAIRS[0], link).try_step() is None
    after = story[story.index("fault") + 1 :]
    assert after[:3] == ["abort", "abort", "drain"], after  # Gloo has two groups
    assert engine.gradient is gradient
    assert not [note for note in after if note.endswith(f"of {gradient.numel()}")]
    absent.go()
