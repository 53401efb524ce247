"""Two ranks on a device: the exact sum, and a peer that dies in the middle of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from health.absence import find_absences
from health.flight import find_pending
from tests.support.fabric import GLOO, GLOO_ON_CUDA, NCCL, Fabric, FabricGroup, on
from tests.support.lane_gradients import COUNT, ENDS, PADDING, lane_gradients
from tests.support.member import Member, end_groups_at_the_call, train_alone
from tests.support.processes import PATIENCE, TIMEOUT_S, lose_itself, play
from trainer.backend.flight_recorder import read_flight_recorder
from trainer.backend.groups import (
    check_replica_group,
    leave_replica_group,
    make_replica_group,
    torch_device,
)
from trainer.backend.polling import poll_until
from trainer.backend.rendezvous import Rendezvous
from trainer.loop.phases import Phase
from trainer.parallel.layout import ParallelDims
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import Meeting, Place
from trainer.replication.reduction import Reduction
from trainer.replication.replicas import EXCHANGE, Flight

LIMIT_S = 10.0
"""In which a rank has left a group whose peer is dead."""

# -- the sum --------------------------------------------------------------------------------------

DEALT = [(0, 2), (1,)]
"""Two subtrees against one."""


def add_up(rank: int, port: int, fabric: Fabric) -> None:
    """This rank's part of some sums. The gradients come late, as those of a backward do."""
    fabric.enter(rank, 2)
    device = torch_device(fabric.device)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    cross = FabricGroup(
        fabric, meet, "sum", lanes=DEALT, total_lanes=3, rank=rank, leave_now=lambda: False
    )
    gradients = lane_gradients(3)
    expected = (gradients[0] + gradients[1]) + gradients[2]
    ready = [torch.cat([gradient, torch.zeros(PADDING)]).to(device) for gradient in gradients]
    mine = {(lane, lane + 1): torch.empty_like(ready[lane]) for lane in DEALT[rank]}
    into = torch.empty_like(ready[0])
    for _ in range(3):
        for flat in (into, *mine.values()):
            flat.fill_(torch.nan)
        reduction = Reduction(cross, mine, into, ENDS, exact=True)
        fabric.hold_up()
        for (lane, _end), flat in mine.items():
            flat.copy_(ready[lane])
        for stop in range(100 * rank, COUNT, 97 + 150 * rank):
            reduction.start(stop)
        reduction.finish()
        assert into[:COUNT].cpu().numpy().tobytes() == expected.numpy().tobytes()
    assert cross.sum(torch.tensor([1.0, rank], device=device)).tolist() == [2.0, 1.0]
    assert cross.gather_numbers(None if rank else 2**40) == [2**40, None]
    store = dist.TCPStore("127.0.0.1", port)
    store.set(f"added up {rank}", "")
    store.wait(["added up 0", "added up 1"], PATIENCE)
    cross.close()


@on(GLOO, GLOO_ON_CUDA, NCCL)
def test_both_ranks_get_the_sum_of_all_lanes_in_the_order_of_the_tree(fabric: Fabric) -> None:
    store = play(add_up, fabric, processes=2)
    assert store.check(["added up 0", "added up 1"])


# -- a peer does not arrive -----------------------------------------------------------------------


def wait_for_a_peer(rank: int, port: int, fabric: Fabric) -> None:
    """Rank 0 waits in a sum of the third step, which rank 1 does not begin."""
    fabric.enter(rank, 2)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    called: list[str] = []
    cross = FabricGroup(
        fabric,
        meet,
        "cross/7",
        lanes=[(0,), (1,)],
        total_lanes=2,
        rank=rank,
        leave_now=lambda: bool(called),
    )
    numbers = torch.ones(3, device=torch_device(fabric.device))
    for _ in range(2):
        cross.sum(numbers)
    if rank == 0:
        cross.start(lambda group: group.allreduce([numbers]), numbers)
    store = dist.TCPStore("127.0.0.1", port)
    store.set(f"begun {rank}", "")
    store.wait(["begun 0", "begun 1"], PATIENCE)
    store.set(f"recording {rank}", read_flight_recorder(fabric.group_device).decode())
    store.wait(["recording 0", "recording 1"], PATIENCE)
    called.append("fault")
    cross.close()


@on(GLOO, NCCL)
def test_recordings_tell_who_has_not_arrived(fabric: Fabric) -> None:
    store = play(wait_for_a_peer, fabric, processes=2)
    recordings = {f"w{rank}": store.get(f"recording {rank}").decode() for rank in range(2)}
    before = 4 if fabric.backend == "nccl" else 0  # those that connect
    (absence,) = find_absences(recordings, {"cross/7": ("w0", "w1")})
    assert str(absence) == (
        f"w1 has not begun all_reduce {before + 3} of the group across replicas, in which w0 waits"
    )
    pending = [one for one in find_pending(recordings["w0"]) if "cross/7" in one["group"]]
    assert [one["sizes"] for one in pending] == [[[3]]]


# -- a peer of another replica dies ---------------------------------------------------------------

FATAL, GATE, STEPS = 2, 4, 8
SECRET = b"of the run"
HALVES, ALL_HERE = [(0,), (1,)], [(0, 1), ()]


class DoomedGroup(FabricGroup):
    """Ends its process with the first collective of step FATAL under way, when the peer waits."""

    def __init__(self, member: Member, *arguments: Any, **options: Any) -> None:
        self._member = member
        super().__init__(*arguments, **options)

    def start(
        self, issue: Callable[[Any], Any], *buffers: torch.Tensor, channel: int = EXCHANGE
    ) -> Flight:
        flight = super().start(issue, *buffers, channel=channel)
        if self._member.progress.step == FATAL:
            self._member.store.wait(["the survivor waits"], PATIENCE)
            lose_itself("SIGKILL")
        return flight


class Survivor(Member):
    """Says when it has computed its part of step FATAL."""

    def at_step(self, step: int, phase: Phase) -> None:
        if (self.generation, step, phase) == (1, FATAL, "reduce"):
            self.store.set("the survivor waits", "")


class Joining(Member):
    """Has its state in step GATE, and by then some steps to make up for."""

    def at_step(self, step: int, phase: Phase) -> None:
        if (self.generation, step, phase) == (2, GATE, "reduce"):
            assert self.newcomer is not None and not self.newcomer.finish()
            self.store.set("steps are kept", "")
            poll_until(self.newcomer.finish, bool, TIMEOUT_S)


class LateMeeting(Meeting):
    """Of a source that is not found before its newcomer has kept some steps."""

    def tell(self, places: Sequence[Place], leave_now: Callable[[], bool]) -> None:
        store = dist.TCPStore(self.rendezvous.host, self.rendezvous.port)
        store.wait(["steps are kept"], PATIENCE)
        super().tell(places, leave_now)


def survive(fabric: Fabric, port: int) -> Member:
    """Loses its peer, heals the next one while it trains on alone, and ends with it."""
    member = Survivor(fabric, port, number=0, steps=STEPS)
    gradient = member.engine.gradient
    assert member.run(1, HALVES) == "fault"
    if fabric.backend == "nccl":
        assert member.engine.gradient is gradient, "there may be no memory for a second one"
    left_s = time.monotonic() - float(member.store.get("died"))
    assert left_s < LIMIT_S
    assert member.progress.step == FATAL and set(member.sums.stats) == {0}
    member.store.set("left", "")
    meeting = LateMeeting(rendezvous=member.meet, prefix="heal", secret=SECRET)
    source = Source(member.engine, 0, meeting)
    assert member.run(2, ALL_HERE, heal=source) == "boundary"
    assert member.run(3, HALVES) == "finished"
    return member


def die(fabric: Fabric, port: int) -> Member:
    """Trains until its end."""
    member = Member(fabric, port, number=1, steps=STEPS)
    member.run(1, HALVES, position=1, group=partial(DoomedGroup, member))
    raise AssertionError("it should have ended")


def join(fabric: Fabric, port: int) -> Member:
    """Is there when the peer has left, heals, and takes over its lane."""
    member = Joining(fabric, port, number=2, steps=STEPS)
    member.store.wait(["left"], PATIENCE)
    member.progress.step = FATAL
    meeting = Meeting(rendezvous=member.meet, prefix="heal", secret=SECRET)
    newcomer = Newcomer(member.engine, meeting, clip_norm=0.5)
    assert member.run(2, ALL_HERE, position=1, heal=newcomer) == "boundary"
    assert (newcomer.steps_behind, member.progress.step) == (GATE - FATAL, GATE + 2)
    assert member.run(3, HALVES, position=1) == "finished"
    return member


def live(number: int, port: int, fabric: Fabric) -> None:
    """One process of the four."""
    fabric.enter((0, 1, 1, 0)[number], 2)
    alone = partial(train_alone, number=number, steps=STEPS)
    member = (survive, die, join, alone)[number](fabric, port)
    member.store.set(f"outcome {number}", json.dumps(member.outcome()))
    member.store.wait([f"outcome {n}" for n in (0, 2, 3)], PATIENCE)  # who ends wakes its peers
    leave_replica_group()


@on(GLOO, GLOO_ON_CUDA, NCCL)
def test_the_death_of_a_replica_changes_no_bit(fabric: Fabric) -> None:
    """The survivor leaves in time, trains on, and heals a new one beside it."""
    store = play(live, fabric, processes=4, dies=1)
    survivor, newcomer, alone = (json.loads(store.get(f"outcome {n}")) for n in (0, 2, 3))
    assert len(alone["losses"]) == STEPS
    assert survivor == alone
    assert newcomer == {**alone, "losses": alone["losses"][FATAL:]}


# -- a peer of the same replica dies --------------------------------------------------------------


def make_replica(port: int, prefix: str, rank: int, fabric: Fabric) -> torch.Tensor:
    """A replica of two, and what its ranks have added up."""
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    dims = ParallelDims(shard=2)
    make_replica_group(meet, prefix, rank=rank, dims=dims, device=fabric.device)
    total = torch.ones(3, device=torch_device(fabric.device))
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    return total


def lose_the_peer(number: int, port: int, fabric: Fabric) -> None:
    """Rank 1 dies when rank 0 waits for it in a collective; process 2 takes its place."""
    rank = (0, 1, 1)[number]
    fabric.enter(rank, 2)
    store = dist.TCPStore("127.0.0.1", port)
    if number < 2:
        total = make_replica(port, "first", rank, fabric)
    if number == 0:
        be_left(port, store, total)
    elif number == 1:
        store.wait(["rank 0 waits"], PATIENCE)
        lose_itself("SIGKILL")
    store.wait(["left"], PATIENCE)
    make_replica(port, "again", rank, fabric)
    store.set(f"met {rank}", "")
    store.wait(["met 0", "met 1"], PATIENCE)
    leave_replica_group()


def be_left(port: int, store: dist.TCPStore, total: torch.Tensor) -> None:
    """What a worker does whose replica breaks: one thread hears of it, another is in it."""
    ear = end_groups_at_the_call(port, replica=True)
    work = dist.all_reduce(total, async_op=True)
    store.set("rank 0 waits", "")
    with pytest.raises(RuntimeError):
        work.wait()
        total.tolist()
        check_replica_group()
    ear.join()
    leave_replica_group()
    assert time.monotonic() - float(store.get("died")) < LIMIT_S
    store.set("left", "")


@on(GLOO, NCCL)
def test_a_replica_is_made_anew_when_a_rank_of_it_has_died(fabric: Fabric) -> None:
    store = play(lose_the_peer, fabric, processes=3, dies=1)
    assert store.check(["met 0", "met 1"])
