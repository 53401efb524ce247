"""The peak of a worker's memory in real steps, by the allocator's events as torch's profiler has
them: it knows nothing of how a dry run counts."""

from __future__ import annotations

import json
import tempfile
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
from trainer.replication.lane_sums import LaneSums
from trainer.replication.lanes import deal_lanes
from trainer.replication.replicas import CrossGroup

STEPS = 2


def measured_peak(train: TrainConfig, *, replicas: int) -> int:
    """Bytes that the CPU allocator has given out at once to the first worker, from before its model
    is built to the end of `STEPS` steps. One process for each worker."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(
            _process,
            args=(store.port, train, replicas, results),
            nprocs=replicas * train.parallel.workers,
            start_method="spawn",
        )
        return int(results[0])


def _process(place: int, port: int, train: TrainConfig, replicas: int, results: Any) -> None:
    torch.set_num_threads(1)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=120)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _train(place, meet, train, replicas)
        leave_replica_group()
    if place == 0:
        results[place] = _peak(profiler)


def _train(place: int, meet: Rendezvous, train: TrainConfig, replicas: int) -> None:
    replica, rank = divmod(place, train.parallel.workers)
    engine = make_engine(place, meet, prepare_shape(train), train, replicas=replicas)
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
        lanes=lanes, save_every=None, compare_every=None, max_nonfinite_steps=1, until=STEPS
    )
    loop = TrainLoop(
        engine,
        cross,
        LaneSums(lanes, engine.gradient.numel(), engine.device),
        lanes=dealt[replica],
        progress=Progress(),
        config=config,
        link=QuietLink(),
    )
    for _ in range(STEPS):
        commit = loop.try_step()
        assert commit is not None
        loop.finish_step(commit)


def _peak(profiler: profile) -> int:
    """The most bytes alive at once.

    What another thread lets go of, such as one of Gloo's, the profiler does not see, and its own
    running total only grows. But what is given out again was let go of.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    alive: dict[int, int] = {}
    now = most = 0
    for event in sorted(changes, key=lambda event: float(event["ts"])):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        now += max(size, 0) - alive.pop(address, 0)
        if size > 0:
            alive[address] = size
        most = max(most, now)
    return most
