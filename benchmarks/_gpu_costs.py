"""What fault tolerance adds to a step on a GPU, of which one worker is the only replica.

Its parts take less than a step's time varies, so each is timed by itself: the digest of a lane's
gradient, the commit, the heartbeat's marks and beats. None of them is hidden then behind what it is
hidden behind in a step, so their sum is a bound. Blocks of steps in turns show that nothing else
comes with them, as far as the spread of the bare ones allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from benchmarks._common import plan_turns
from benchmarks._gpu_loops import OurLoop, Pace, Tell, memory
from benchmarks._gpu_models import Workload
from health.heartbeat import BEAT_INTERVAL_S, Heartbeat
from trainer.backend.groups import collectives_begun
from trainer.engine.engine import Engine
from trainer.engine.host_copy import HostBuffer
from trainer.loop.phases import PHASES, Phase
from trainer.replication.lane_sums import LaneSums
from trainer.replication.step_commit import Place

LEFT_OUT = (
    "what goes over replicas: the sum of gradients, a few numbers in the commit",
    "what goes inside a replica of several workers: the commit's numbers, twice",
    "comparing replicas, and lanes that several compute (compare_every, witness_every)",
    "the other processes of a node",
    "what the loop does otherwise than a plain one: rows 'plain' and 'ours, fast' of part 1",
)
"""Of the time of a run's step, no part of the sum."""
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
_REPEATS = 5
_MARKS = 10_000


@dataclass
class Marked(Pace):
    """Beats as a worker of a run does, with each phase."""

    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(collectives_begun))
    marks: int = 0

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        self.marks += 1
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
    size_bytes: int = 0

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        """See Link. What the next step does meanwhile hides the copy, but for its last part."""
        share = engine.state.share(0, 1)
        if self.buffer is None:
            self.size_bytes = share.size_bytes
            self.buffer = HostBuffer(share.size_bytes, engine.device)
        engine.state.copy_to(self.buffer, share)


def measure_costs(tell: Tell, work: Workload, steps: int, blocks: int) -> None:
    """Blocks of `steps` steps in one process: bare, with the heartbeat, with the commit's time
    taken, and with a snapshot after each step; another one begins each turn. All numbers are told
    after each turn, since the machine may be taken away before the last one."""
    loop = OurLoop(work, steps=4 * steps * blocks + steps + 1)
    bare, marked = Pace(), Marked()
    timed, snapshots = CommitTimed(device=work.device), Snapshots()
    links = {"bare": bare, "heartbeat": marked, "commit": timed, "snapshot": snapshots}
    loop.run(Pace(), steps)
    digest_s, norm_s = time_digest(loop.engine), time_norm(loop.engine)
    mark_s, beat_s = time_marks(marked.heartbeat), time_beat()
    spans_s: dict[str, list[list[float]]] = {name: [] for name in links}
    for turn, names in enumerate(plan_turns(list(links), blocks), start=1):
        for name in names:
            link = links[name]
            link.ends_s.clear()
            loop.run(link, steps, snapshot_every=1 if name == "snapshot" else None)
            # Before the first end a snapshot's memory is made, or the last one's copy comes in.
            spans_s[name].append([later - sooner for sooner, later in pairwise(link.ends_s[1:])])
        step_s = {
            name: statistics.median(span_s for block in found for span_s in block)
            for name, found in spans_s.items()
            if name != "commit"  # it waits for the device once more
        }
        commit_s = statistics.median(timed.commits_s)
        parts_s = {
            "digest": digest_s,
            "commit": max(0.0, commit_s - norm_s),  # medians of two measurements
            "marks": marked.marks / (steps * turn) * mark_s,
            "beats": step_s["bare"] / BEAT_INTERVAL_S * beat_s,
        }
        result = {
            "turns": turn,
            "step_ms": {name: round(1e3 * each_s, 3) for name, each_s in step_s.items()},
            "spread": round(spread(spans_s["bare"]), 4),
            "fault_tolerance_ms": {name: round(1e3 * part, 4) for name, part in parts_s.items()},
            "commit_with_norm_ms": round(1e3 * commit_s, 4),
            "norm_ms": round(1e3 * norm_s, 4),
            "fault_tolerance_share": round(sum(parts_s.values()) / step_s["bare"], 5),
            "left_out": LEFT_OUT,
            "heartbeat_share": round(step_s["heartbeat"] / step_s["bare"] - 1, 4),
            "snapshot_share": round(step_s["snapshot"] / step_s["bare"] - 1, 4),
            "snapshot_bytes": snapshots.size_bytes,
        }
        tell(result)
    copy_bytes_per_s = round(time_copy(loop.engine, snapshots))
    tell({"copy_bytes_per_s": copy_bytes_per_s, **memory(work)})
    assert snapshots.buffer is not None
    snapshots.buffer.close()


def spread(blocks: list[list[float]]) -> float:
    """How far the medians of blocks that are alike lie apart, as a share of the smallest: a
    difference of others that is less says nothing."""
    medians = [statistics.median(block) for block in blocks]
    return max(medians) / min(medians) - 1


def time_digest(engine: Engine) -> float:
    """Seconds until the bits of a lane's whole gradient are added up."""
    sums = LaneSums(1, engine.gradient.numel(), engine.device)

    def open_lane() -> None:
        sums.clear()
        sums.begin(0, [0], engine.gradient, alone=True)
        sums.open(0)

    return _time(engine, lambda: sums.settle(engine.gradient.numel()), before=open_lane)


def time_norm(engine: Engine) -> float:
    """Seconds until the gradient's norm is on the host: a part of the commit that clipping takes in
    any loop."""
    return _time(engine, lambda: engine.norm_squared(engine.gradient).item())


def time_marks(heartbeat: Heartbeat) -> float:
    """Seconds of a mark."""
    begun_s = time.perf_counter()
    for _ in range(_MARKS):
        heartbeat.mark(0, 0)
    return (time.perf_counter() - begun_s) / _MARKS


def time_beat() -> float:
    """Seconds in which a beat holds the interpreter's lock: all but two stores of it."""
    begun_s = time.perf_counter()
    for _ in range(_MARKS):
        collectives_begun()
    return (time.perf_counter() - begun_s) / _MARKS


def time_copy(engine: Engine, snapshots: Snapshots) -> float:
    """Bytes a second of a copy that nothing else runs beside."""
    assert snapshots.buffer is not None
    share = engine.state.share(0, 1)
    engine.state.await_copy()
    begun_s = time.perf_counter()
    engine.state.copy_to(snapshots.buffer, share).wait()
    return share.size_bytes / (time.perf_counter() - begun_s)


def _time(
    engine: Engine, call: Callable[[], object], before: Callable[[], None] = lambda: None
) -> float:
    """Seconds of a call with what it starts on the device, which is idle at its beginning: the
    median of some."""
    times_s = []
    for _ in range(_REPEATS):
        before()
        _synchronize(engine)
        begun_s = time.perf_counter()
        call()
        _synchronize(engine)
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s)


def _synchronize(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
