"""Ranks of which one is killed: how soon the others are out of the group, and have a step."""

from __future__ import annotations

import time
from typing import Any

from benchmarks._common import median_of
from tests.support.fabric import GLOO, NCCL, Fabric
from tests.support.member import LANES, Member, small_task, small_train
from tests.support.processes import lose_itself, play
from trainer.backend.groups import leave_replica_group
from trainer.loop.compile_ahead import rehearse
from trainer.loop.phases import Phase
from trainer.replication.step_commit import Commit

FATAL, STEPS = 3, 6
KILLED = 1
CASES = {"alone": 2, "two go on": 3}
"""With so many ranks. One that is alone needs no group; two meet in a new one."""


class Survivor(Member):
    """Notes its first step after the loss."""

    first_s: float | None = None

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""
        super().committed(commit, lr, applied)
        if self.generation == 2 and self.first_s is None:
            self.first_s = time.monotonic()


class Killed(Member):
    """Is killed in the backward of its step FATAL."""

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        if (step, phase) == (FATAL, "backward"):
            self.store.set("killed", str(time.monotonic()))
            lose_itself("SIGKILL")


def live(number: int, port: int, fabric: Fabric, ranks: int) -> None:
    """One of them. The third has no lane until the second is killed. All rehearse, as workers do:
    none loads kernels while others wait."""
    fabric.enter(number, ranks)
    rehearse(
        small_task(),
        small_train(STEPS),
        lanes=LANES,
        max_replicas=ranks,
        device=fabric.device,
    )
    kind = Killed if number == KILLED else Survivor
    member = kind(fabric, port, number=number, steps=STEPS, replicas=ranks)
    lanes: list[tuple[int, ...]] = [(0,), (1,), ()]
    assert member.run(1, lanes[:ranks], position=number) == "fault"
    member.store.set(f"left {number}", str(time.monotonic()))
    others = [(0, 1)] if ranks == 2 else [(0,), (1,)]
    assert member.run(2, others, position=min(number, 1)) == "finished"
    assert isinstance(member, Survivor)
    member.store.set(f"a step {number}", str(member.first_s))
    leave_replica_group()


def measure_recovery(device: str, repeats: int) -> dict[str, Any]:
    """Each case's medians of what `lose_one` finds."""
    fabric = NCCL if device == "cuda" else GLOO
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(repeats):
        for case, ranks in CASES.items():
            found[case].append(lose_one(fabric, ranks))
    return {case: median_of(runs) for case, runs in found.items()}


def lose_one(fabric: Fabric, ranks: int) -> dict[str, float]:
    """Seconds from the kill until the last of the others is there; a step of this model takes
    milliseconds. They are called away when the process is seen to be about to end (`told_s`), as by
    a node's agent; where it has a GPU it takes a while until it has ended, and until its peers'
    connections are closed."""
    store = play(live, fabric, ranks, processes=ranks, dies=KILLED)
    killed_s = float(store.get("killed"))
    others = [number for number in range(ranks) if number != KILLED]
    left_s = max(float(store.get(f"left {number}")) for number in others)
    step_s = max(float(store.get(f"a step {number}")) for number in others)
    return {
        "told_s": float(store.get("died")) - killed_s,
        "left_s": left_s - killed_s,
        "step_s": step_s - killed_s,
    }
