"""What fault tolerance adds to a step on a GPU: commit, heartbeat, snapshot."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from benchmarks._gpu_loops import OurLoop, Pace, memory
from benchmarks._gpu_models import Workload
from health.heartbeat import Heartbeat
from trainer.backend.groups import collectives_begun
from trainer.engine.engine import Engine
from trainer.engine.host_copy import HostBuffer
from trainer.loop.phases import PHASES, Phase
from trainer.replication.step_commit import Place

_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}


@dataclass
class Marked(Pace):
    """Beats as a worker of a run does, with each phase."""

    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(collectives_begun))

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        self.heartbeat.mark(step, _NUMBERS[phase])


@dataclass
class CommitTimed(Pace):
    """Takes the time from a device that is done to a step that is agreed on."""

    device: str = "cpu"
    begun_s: float = 0.0
    commits_s: list[float] = field(default_factory=list)

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        if phase == "before_commit":
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.begun_s = time.perf_counter()
        if phase == "after_commit":
            self.commits_s.append(time.perf_counter() - self.begun_s)


@dataclass
class Snapshots(Pace):
    """Copies the state to shared memory after each step."""

    buffer: HostBuffer | None = None
    copies_s: list[float] = field(default_factory=list)
    size_bytes: int = 0

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        """See Link. What the next step does meanwhile hides the copy, but for its last part."""
        share = engine.state.share(0, 1)
        if self.buffer is None:
            self.size_bytes = share.size_bytes
            self.buffer = HostBuffer(share.size_bytes, share.device)
        engine.state.copy_to(self.buffer, share)


def measure_costs(work: Workload, steps: int, blocks: int) -> dict[str, Any]:
    """Blocks of `steps` steps in turns in one process: bare, with the heartbeat, with the commit's
    time taken, and with a snapshot after each step."""
    loop = OurLoop(work, steps=4 * steps * blocks + steps + 1)
    bare, marked = Pace(), Marked()
    timed, snapshots = CommitTimed(device=work.device), Snapshots()
    loop.run(Pace(), steps)
    spans: dict[str, list[float]] = {"bare": [], "heartbeat": [], "snapshot": []}
    for _ in range(blocks):
        for name, link in (("bare", bare), ("heartbeat", marked), ("snapshot", snapshots)):
            link.ends_s.clear()
            loop.run(link, steps, snapshot_every=1 if name == "snapshot" else None)
            ends_s = link.ends_s
            # With the first pair a snapshot's memory is made.
            spans[name] += [b - a for a, b in pairwise(ends_s[1:])]
        loop.run(timed, steps)
    medians_ms = {name: 1e3 * statistics.median(found) for name, found in spans.items()}
    result = {
        "step_ms": {name: round(ms, 3) for name, ms in medians_ms.items()},
        "commit_ms": round(1e3 * statistics.median(timed.commits_s), 3),
        "heartbeat_share": round(medians_ms["heartbeat"] / medians_ms["bare"] - 1, 4),
        "snapshot_share": round(medians_ms["snapshot"] / medians_ms["bare"] - 1, 4),
        "snapshot_bytes": snapshots.size_bytes,
        "copy_bytes_per_s": round(time_copy(loop.engine, snapshots)),
        **memory(work),
    }
    assert snapshots.buffer is not None
    snapshots.buffer.close()
    return result


def time_copy(engine: Engine, snapshots: Snapshots) -> float:
    """Bytes a second of a copy that nothing else runs beside."""
    assert snapshots.buffer is not None
    share = engine.state.share(0, 1)
    engine.state.await_copy()
    begun_s = time.perf_counter()
    engine.state.copy_to(snapshots.buffer, share).wait()
    return share.size_bytes / (time.perf_counter() - begun_s)
