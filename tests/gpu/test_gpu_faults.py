"""A replica loses its peer at the places where NCCL hears nothing by itself: before, in and after
the first all-to-all of a generation, behind a full launch queue, and with the memory used up."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from tests.support import processes
from tests.support.fabric import GLOO, GLOO_ON_CUDA, NCCL, Fabric, FabricGroup, on
from tests.support.member import Member, end_groups_at_the_call, train_alone
from tests.support.processes import PATIENCE, Loss, lose_itself, play
from trainer.backend.groups import leave_replica_group
from trainer.backend.polling import poll_until
from trainer.errors import GroupError
from trainer.loop.phases import Phase
from trainer.replication.replicas import EXCHANGE, Flight

LIMIT_S = 10.0
"""In which a rank has left a group whose peer is lost."""
STEPS = 3
HALVES = [(0,), (1,)]

Point = Literal["before", "in", "after"]
"""Of the first all-to-all."""

QUEUED = 4096
"""Kernels behind a bucket that never comes: more than a launch queue holds, which has 1,024."""


class DoomedGroup(FabricGroup):
    """Loses its process at a point of its first collective."""

    def __init__(
        self, member: Member, point: Point, loss: Loss, *rest: Any, **options: Any
    ) -> None:
        self._member, self._point, self._loss = member, point, loss
        super().__init__(*rest, **options)

    def start(
        self, issue: Callable[[Any], Any], *buffers: torch.Tensor, channel: int = EXCHANGE
    ) -> Flight:
        if self._point == "before":
            self._fall("the survivor waits")
        flight = super().start(issue, *buffers, channel=channel)
        if self._point == "after":
            poll_until(flight.work.is_completed, bool, PATIENCE.total_seconds())
        self._fall("the survivor waits" if self._point == "in" else "the survivor begins")
        return flight

    def _fall(self, seen: str) -> None:
        self._member.store.set("the peer is there", "")
        self._member.store.wait([seen], PATIENCE)
        lose_itself(self._loss)


class Survivor(Member):
    """Says how far it is in the first step, and what it has before the sum may need more."""

    full_queue = full_memory = False
    hog: torch.Tensor | None = None

    def at_step(self, step: int, phase: Phase) -> None:
        if (self.generation, step) != (1, 0):
            return
        if phase == "data":
            self.store.set("the survivor begins", "")
        if phase == "reduce":
            if self.full_memory:
                # On one GPU the others must have what they need of it.
                self.store.wait(["the peer is there", "outcome 2"], PATIENCE)
                self.hog = all_memory(self.engine.device)
            self.store.set("the survivor waits", "")
            if self.full_queue:
                self.fill_queue()

    def fill_queue(self) -> None:
        """Queues more behind the bucket than the device takes: the host waits in a launch, until
        another thread ends the group."""
        numbers = torch.zeros(8, device=self.engine.device)
        with self.cross.on_stream():
            for _ in range(QUEUED):
                numbers.add_(1)


def all_memory(device: torch.device) -> torch.Tensor | None:
    """What is left of a GPU's memory; a CPU keeps its own."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - (64 << 20), dtype=torch.uint8, device=device)


def survive(fabric: Fabric, port: int, fills: str) -> Member:
    """Loses its peer in its first step, and does all steps alone."""
    member = Survivor(fabric, port, number=0, steps=STEPS)
    member.full_queue, member.full_memory = fills == "queue", fills == "memory"
    end_groups_at_the_call(port, replica=False)
    assert member.run(1, HALVES) == "fault"
    left_s = time.monotonic() - float(member.store.get("died"))
    assert left_s < LIMIT_S
    assert member.progress.step == 0
    member.hog = None
    assert member.run(2, [(0, 1)]) == "finished"
    return member


def be_lost(fabric: Fabric, port: int, point: Point, loss: Loss) -> Member:
    """Trains until its end."""
    member = Member(fabric, port, number=1, steps=STEPS)
    member.run(1, HALVES, position=1, group=partial(DoomedGroup, member, point, loss))
    raise AssertionError("it should have been lost")


def live(number: int, port: int, fabric: Fabric, point: Point, loss: Loss, fills: str) -> None:
    """One process of the three."""
    fabric.enter((0, 1, 0)[number], 2)
    if number == 1:
        be_lost(fabric, port, point, loss)
    if number == 0:
        member = survive(fabric, port, fills)
    else:
        member = train_alone(fabric, port, number=number, steps=STEPS)
    member.store.set(f"outcome {number}", json.dumps(member.outcome()))
    leave_replica_group()


def check_bits(store: dist.TCPStore) -> None:
    survivor, alone = (json.loads(store.get(f"outcome {n}")) for n in (0, 2))
    assert len(alone["losses"]) == STEPS
    assert survivor == alone


@pytest.mark.parametrize("point", ["before", "in", "after"])
@on(GLOO, GLOO_ON_CUDA, NCCL)
def test_a_peer_killed_around_the_first_all_to_all_changes_no_bit(
    fabric: Fabric, point: Point
) -> None:
    check_bits(play(live, fabric, point, "SIGKILL", "nothing", processes=3, dies=1))


@on(GLOO, GLOO_ON_CUDA, NCCL)
def test_a_peer_that_stands_still_changes_no_bit(fabric: Fabric) -> None:
    """Its connections stay open: nobody wakes the survivor but the call."""
    check_bits(play(live, fabric, "before", "SIGSTOP", "nothing", processes=3, dies=1))


@on(GLOO, GLOO_ON_CUDA, NCCL)
def test_a_call_is_heard_behind_a_full_launch_queue(fabric: Fabric) -> None:
    check_bits(play(live, fabric, "before", "SIGSTOP", "queue", processes=3, dies=1))


@on(GLOO, GLOO_ON_CUDA, NCCL)
def test_a_fault_is_met_without_memory(fabric: Fabric) -> None:
    """What meets it asks the device for none."""
    check_bits(play(live, fabric, "before", "SIGSTOP", "memory", processes=3, dies=1))


def wait_for_ever(number: int, port: int, fabric: Fabric) -> None:
    """One that was to be lost, and is not."""
    dist.TCPStore("127.0.0.1", port).wait(["never set"], PATIENCE)


def test_a_test_that_is_cut_off_leaves_no_process_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "TIMEOUT_S", 0.5)
    with pytest.raises(GroupError, match=r"did not come within 0\.5 s"):
        play(wait_for_ever, GLOO, processes=2, dies=0)
    assert multiprocessing.active_children() == []
