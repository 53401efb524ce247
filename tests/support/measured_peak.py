"""The peak of a worker's memory in real steps, by the allocator's events as torch's profiler has
them: it knows nothing of how a dry run counts."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import tempfile
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from tests.support.data_plane import make_engine
from tests.support.quiet_link import QuietLink
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.dryrun.shape import prepare_shape
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.steps import TrainLoop
from trainer.replication.lanes import deal_lanes
from trainer.replication.replicas import CrossGroup
from trainer.replication.step_commit import Commit
from trainer.tasks.task import PreparedTask

STEPS = 2

_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 16384
"""Of glibc's mallopt: has it give out again at once what was let go of, see `_Alive`."""

# Each worker would import for longer than it computes.
multiprocessing.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])


def measured_peak(train: TrainConfig, *, replicas: int, evaluates: bool = False) -> int:
    """Bytes that the CPU allocator has given out at once to the first worker of a replica, from
    before its model is built to the end of `STEPS` steps, or of an evaluation after them; the most
    of all replicas. One process for each worker."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(
            _process,
            args=(store.port, train, replicas, evaluates, results),
            nprocs=replicas * train.parallel.workers,
            start_method="forkserver",
        )
        return max(results.values())


def _process(
    place: int, port: int, train: TrainConfig, replicas: int, evaluates: bool, results: Any
) -> None:
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES) == 1
    torch.set_num_threads(1)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=120)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop = make_loop(place, meet, prepare_shape(train), train, replicas)
        for _ in range(STEPS):
            take_step(loop)
        if evaluates:
            loop.due.evaluate()
        del loop
        leave_replica_group()
    if place % train.parallel.workers == 0:
        results[place] = peak_of(profiler)


def take_step(loop: TrainLoop) -> Commit:
    """One step that nothing happens to."""
    commit = loop.try_step()
    assert commit is not None
    loop.finish_step(commit)
    return commit


def make_loop(
    place: int, meet: Rendezvous, task: PreparedTask, train: TrainConfig, replicas: int
) -> TrainLoop:
    """The loop of the worker at `place`; its caller takes the steps."""
    replica, rank = divmod(place, train.parallel.workers)
    engine = make_engine(place, meet, task, train, replicas=replicas)
    lanes = train.lanes or replicas
    dealt = deal_lanes(lanes, tuple(range(replicas)))
    cross = CrossGroup(
        meet,
        f"cross/{rank}",
        lanes=[dealt[index] for index in range(replicas)],
        total_lanes=lanes,
        rank=replica,
        device="cpu",
        leave_now=lambda: False,
    )
    config = LoopConfig(
        lanes=lanes, save_every=None, compare_every=None, max_nonfinite_steps=1, until=train.steps
    )
    return TrainLoop(
        engine,
        cross,
        engine.make_sums(lanes, replicas),
        lanes=dealt[replica],
        progress=Progress(),
        config=config,
        link=QuietLink(),
    )


def peak_of(profiler: profile) -> int:
    """The most bytes alive at once, by the allocator's events."""
    alive, most = _Alive(), 0
    for start, size in _changes(profiler):
        alive.change(start, size)
        most = max(most, alive.bytes)
    return most


def taken(profiler: profile, least: int) -> int:
    """How often `least` bytes or more were given out, by the allocator's events."""
    return sum(size >= least for _, size in _changes(profiler))


def _changes(profiler: profile) -> list[tuple[int, int]]:
    """Addresses and bytes that were given out, or, below zero, let go of; in order."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: float(event["ts"]))
    return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in changes]


class _Alive:
    """What has been given out.

    What another thread lets go of, such as one of Gloo's, the profiler does not see. But what is
    given out again, in whole or in part, was let go of.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self.bytes = 0

    def change(self, start: int, size: int) -> None:
        """`size` bytes at `start` were given out, or, below zero, let go of."""
        if size < 0:
            if self._sizes.get(start) == -size:
                self._drop(start)
            return
        first = bisect_left(self._starts, start)
        if first and self._starts[first - 1] + self._sizes[self._starts[first - 1]] > start:
            first -= 1
        for other in self._starts[first : bisect_left(self._starts, start + max(1, size))]:
            self._drop(other)
        insort(self._starts, start)
        self._sizes[start] = size
        self.bytes += size

    def _drop(self, start: int) -> None:
        self.bytes -= self._sizes.pop(start)
        del self._starts[bisect_left(self._starts, start)]
