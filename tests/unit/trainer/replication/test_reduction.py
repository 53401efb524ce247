"""The reduction across replicas, each replica a thread: the bits, the order, and a lost peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.lane_gradients import COUNT, ENDS, PADDING, lane_gradients
from trainer.backend.rendezvous import Rendezvous
from trainer.errors import CrossGroupLost
from trainer.replication.lanes import Node, blocks_of, sum_tree
from trainer.replication.reduction import Reduction
from trainer.replication.replicas import CrossGroup, Flight


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr(
        "trainer.backend.rendezvous.CONNECTIONS", 4
    )  # as many workers in one process
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=store.port, timeout_s=30)


def held_by(lanes: tuple[int, ...], gradients: list[torch.Tensor]) -> dict[Node, torch.Tensor]:
    """A replica's subtrees, padded."""
    total, held = len(gradients), {}
    for lo, hi in blocks_of(lanes, total):
        parts = {(lane, lane + 1): gradients[lane] for lane in range(lo, hi)}
        tree_sum = sum_tree(parts, (lo, hi), torch.add).float()
        held[lo, hi] = torch.cat([tree_sum, torch.zeros(PADDING)])
    return held


def at_every_replica(
    rendezvous: Rendezvous,
    dealt: Sequence[tuple[int, ...]],
    act: Callable[[CrossGroup], object],
    leave_now: Callable[[], bool] = lambda: False,
    make: type[CrossGroup] = CrossGroup,
) -> list[object]:
    def replica(rank: int) -> object:
        cross = make(
            rendezvous,
            "test",
            lanes=dealt,
            total_lanes=sum(map(len, dealt)),
            rank=rank,
            device="cpu",
            leave_now=leave_now,
        )
        try:
            return act(cross)
        finally:
            cross.close()

    with ThreadPoolExecutor(len(dealt)) as pool:
        return list(pool.map(replica, range(len(dealt))))


@pytest.mark.parametrize(
    "dealt",
    [
        [(0,), (1,)],
        [(0, 1), (2, 3)],
        [(0, 1), (2,), (3,)],
        [(0, 3), (1,), (2,)],  # more buffers than replicas, as after a fault
        [(), (0, 1, 2)],  # a newcomer, and one that has everything
        [(0,), (), (1, 2), (3, 4)],
        [(0, 1, 2)],
    ],
)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_replica_gets_the_sum_of_all_lanes(
    rendezvous: Rendezvous,
    dealt: list[tuple[int, ...]],
    exact: bool,
    in_place: bool,
    dtype: torch.dtype,
) -> None:
    """Also where one of a replica's subtrees lies where the sum goes."""
    gradients = [gradient.to(dtype) for gradient in lane_gradients(sum(map(len, dealt)))]
    lanes = {(lane, lane + 1): gradient for lane, gradient in enumerate(gradients)}
    expected = sum_tree(lanes, (0, len(gradients)), torch.add).float()

    def act(cross: CrossGroup) -> torch.Tensor:
        mine = held_by(dealt[cross.rank], gradients)
        before = {node: block.clone() for node, block in mine.items()}
        into = torch.full((COUNT + PADDING,), float("nan"))
        at_home = min(mine) if in_place and mine else None
        for _ in range(3):
            if at_home is not None:
                into.copy_(before[at_home])
                mine[at_home] = into
            reduction = Reduction(cross, mine, into, ENDS, exact=exact, dtype=dtype)
            # Each replica begins its buckets at other times than the others.
            for stop in range(100 * cross.rank, COUNT, 97 + 150 * cross.rank):
                reduction.start(stop)
            reduction.finish()
            assert reduction.wrote
        assert all(torch.equal(mine[node], before[node]) for node in mine if node != at_home)
        return into[:COUNT]

    for total in at_every_replica(rendezvous, dealt, act):
        assert isinstance(total, torch.Tensor)
        if exact:
            assert total.numpy().tobytes() == expected.numpy().tobytes()
        else:
            reference = torch.stack(gradients).double().sum(0)
            scale = torch.stack(gradients).double().abs().sum(0)
            assert ((total - reference).abs() <= torch.finfo(dtype).eps * 8 * scale).all()


class OneQueue(CrossGroup):
    """Like NCCL: one group for all collectives, and to follow one is never to be put off."""

    def _join(self, *args: Any) -> None:
        super()._join(*args)
        del self._groups[1:]

    def may_follow(self, flight: Flight) -> bool:
        return True


def test_one_queue_has_one_order_whoever_begins_when(rendezvous: Rendezvous) -> None:
    """A newcomer has no gradients: it begins all buckets after backward."""
    dealt, gradients = [(0, 1), ()], lane_gradients(2)

    def act(cross: CrossGroup) -> bool:
        into = torch.full((COUNT + PADDING,), float("nan"))
        reduction = Reduction(cross, held_by(dealt[cross.rank], gradients), into, ENDS, exact=True)
        for stop in ENDS[: 2 if cross.rank == 0 else 0]:
            reduction.start(stop)
        reduction.finish()
        return torch.equal(into[:COUNT], gradients[0] + gradients[1])

    assert at_every_replica(rendezvous, dealt, act, make=OneQueue) == [True, True]


def test_buckets_travel_while_later_gradients_are_still_missing(rendezvous: Rendezvous) -> None:
    dealt, gradients = [(0,), (1,)], lane_gradients(2)
    total = gradients[0] + gradients[1]

    def act(cross: CrossGroup) -> bool:
        mine = held_by(dealt[cross.rank], gradients)
        into = torch.full((COUNT + PADDING,), float("nan"))
        reduction = Reduction(cross, mine, into, ENDS, exact=True)
        deadline = time.monotonic() + 20
        # A call begins buckets or advances what has arrived; it waits for nothing.
        while not torch.equal(into[:500], total[:500]) and time.monotonic() < deadline:
            reduction.start(500)
        early, untouched = torch.equal(into[:500], total[:500]), bool(into[500:COUNT].isnan().all())
        reduction.finish()
        return early and untouched and torch.equal(into[:COUNT], total)

    assert at_every_replica(rendezvous, dealt, act) == [True, True]


@pytest.mark.parametrize("exact", [True, False])
def test_a_peer_that_does_not_come_shows_in_finish_only(
    rendezvous: Rendezvous, exact: bool
) -> None:
    dealt, announced, done = [(0,), (1,)], threading.Event(), threading.Event()

    def act(cross: CrossGroup) -> str:
        if cross.rank == 1:
            done.wait(30)
            return "absent"
        mine = held_by((0,), lane_gradients(2))
        reduction = Reduction(cross, mine, torch.zeros(COUNT + PADDING), ENDS, exact=exact)
        reduction.start(300)
        announced.set()
        reduction.start(COUNT)
        with pytest.raises(CrossGroupLost, match="left for a regroup"):
            reduction.finish()
        again = Reduction(cross, mine, torch.zeros(COUNT + PADDING), ENDS, exact=exact)
        again.start(COUNT)
        with pytest.raises(CrossGroupLost, match="left for a regroup"):
            again.finish()
        done.set()
        return "left"

    assert at_every_replica(rendezvous, dealt, act, announced.is_set) == ["left", "absent"]
