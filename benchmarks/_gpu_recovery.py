"""Two ranks, of which one is killed: how soon the other is out of the group, and has a step."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.support.fabric import GLOO, NCCL, Fabric
from tests.support.member import Member
from tests.support.processes import lose_itself, play
from trainer.backend.groups import leave_replica_group
from trainer.loop.phases import Phase
from trainer.replication.step_commit import Commit

FATAL, STEPS = 3, 6


class Survivor(Member):
    """Notes its first step after the loss."""

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""
        super().committed(commit, lr, applied)
        if self.generation == 2 and not self.store.check(["a step"]):
            self.store.set("a step", str(time.monotonic()))


class Killed(Member):
    """Is killed in the backward of its step FATAL."""

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        if (step, phase) == (FATAL, "backward"):
            lose_itself("SIGKILL")


def live(number: int, port: int, fabric: Fabric) -> None:
    """One of the two."""
    fabric.enter(number, 2)
    member = (Survivor, Killed)[number](fabric, port, number=number, steps=STEPS)
    assert member.run(1, [(0,), (1,)], position=number) == "fault"
    member.store.set("left", str(time.monotonic()))
    assert member.run(2, [(0, 1)]) == "finished"
    leave_replica_group()


def measure_recovery(device: str, repeats: int) -> dict[str, Any]:
    """Seconds from the news of the death, medians; a step of this model takes milliseconds."""
    found: dict[str, list[float]] = {"left_s": [], "step_s": []}
    for _ in range(repeats):
        store = play(live, NCCL if device == "cuda" else GLOO, processes=2, dies=1)
        died_s = float(store.get("died"))
        found["left_s"].append(float(store.get("left")) - died_s)
        found["step_s"].append(float(store.get("a step")) - died_s)
    return {name: round(statistics.median(times_s), 4) for name, times_s in found.items()}
