"""Runs the data plane without a cluster: one process per slot, one generation, no faults.

What `elastic` does for a run (placement, rosters, records) is done here by hand, so that the
arithmetic of layouts can be tested apart from recovery.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from checkpointing import (
    Attempt,
    Box,
    Keys,
    Manifest,
    Reader,
    Receipt,
    Store,
    commit,
    newest,
    open_store,
    write_shared,
)
from tests.support.fabric import GLOO, Fabric, FabricGroup
from tests.support.processes import killed_after
from tests.support.quiet_link import QuietLink
from trainer.backend import determinism
from trainer.backend.groups import (
    Device,
    leave_replica_group,
    make_replica_group,
)
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.engine.host_copy import HostBuffer
from trainer.engine.names import PARAMETERS
from trainer.engine.shared_copy import open_copy
from trainer.loop.clock import OwnTimes, StepTimes
from trainer.loop.link import Link, LoopConfig, Progress
from trainer.loop.steps import TrainLoop
from trainer.parallel.compiled import keep_compiled
from trainer.parallel.layout import Slot
from trainer.replication.lanes import deal_lanes
from trainer.replication.step_commit import Commit, Place
from trainer.tasks.task import PreparedTask


class DictStore:
    """The part of a store that a writer needs."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        self.objects[key] = b"".join(chunks)
        return len(self.objects[key])


@dataclass
class SavingLink(QuietLink):
    """Keeps what happens, and saves to memory."""

    commits: list[Commit] = field(default_factory=list)
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)
    times: list[StepTimes] = field(default_factory=list)
    own: list[OwnTimes] = field(default_factory=list)
    replicas: int = 0
    """Share the writing of saves; 0: nothing is saved."""
    saved: tuple[Receipt, dict[str, bytes]] | None = None

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        self.commits.append(commit)

    def timed(self, times: StepTimes) -> None:
        self.times.append(times)

    def worked(self, own: OwnTimes) -> None:
        self.own.append(own)

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        """Writes this worker's share from a copy, to memory."""
        if not self.replicas:
            return
        share = engine.state.share(engine.slot.replica, self.replicas)
        store: Any = DictStore()
        buffer = HostBuffer(share.size_bytes, engine.device)
        engine.state.copy_to(buffer, share).wait()
        rank = engine.slot.replica * engine.train_config.parallel.workers + engine.rank
        with open_copy(os.getpid(), buffer.fd, buffer.number) as memory:
            receipt = write_shared(
                store, Keys(), Attempt(rank=rank, step=step, generation=1), share.slices, memory
            )
        self.saved = receipt, store.objects

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        self.evaluations.append((step, loss, tokens))


Slices = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]
"""Parameter name -> (offsets, sizes, what this worker has of it)."""


@dataclass(frozen=True)
class WorkerResult:
    """What one worker saw."""

    buckets: int
    losses: list[float]
    norms: list[float]
    digests: list[list[int]]
    evaluations: list[tuple[int, float, int]]
    times: list[StepTimes]
    own: list[OwnTimes]
    local: Slices
    """Parameters at the end."""
    gradient: Slices
    """Of the last step: what the optimizer got, scaled and summed over the replicas."""
    saved: tuple[Receipt, dict[str, bytes]] | None
    """Its part of the save at the end: what it wrote, by key."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the data plane."""

    task: PreparedTask
    train: TrainConfig
    replicas: int
    lanes: int
    saves: bool = False
    """Whether the end is saved."""
    resumes: str = ""
    """Where the store lies whose newest checkpoint it goes on from; "": it begins."""

    @property
    def workers(self) -> int:
        """Places in it."""
        return self.replicas * self.train.parallel.workers


def _process(
    number: int,
    port: int,
    runs: Sequence[Run],
    orders: Sequence[Sequence[int]],
    fabric: Fabric,
    results: Any,
) -> None:
    """One process, which takes the place `orders[i][number]` in the i-th run, or none."""
    gc.freeze()  # each formation that ends collects garbage: not among all that is imported
    fabric.enter(number, max(map(len, orders)))
    determinism.settle(runs[0].train.determinism, fabric.device, os.environ)
    if runs[0].train.compile != "off":
        keep_compiled(os.environ, 1)
    rendezvous = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    for formation, (run, order) in enumerate(zip(runs, orders, strict=True)):
        if number < len(order):
            place = order[number]
            result = train_at(
                place,
                formation,
                rendezvous,
                fabric,
                run.task,
                run.train,
                replicas=run.replicas,
                lanes=run.lanes,
                saves=run.saves,
                resumes=run.resumes,
            )
            # By value: multiprocessing would send a file descriptor for each tensor.
            results[formation, place] = pickle.dumps(result)
            leave_replica_group()


def make_engine(
    index: int,
    rendezvous: Rendezvous,
    task: PreparedTask,
    train: TrainConfig,
    *,
    formation: int = 0,
    device: Device = "cpu",
    replicas: int = 1,
) -> Engine:
    """The engine at place `index`, filled from the seed. All workers of its replica call it."""
    replica, rank = divmod(index, train.parallel.workers)
    mesh = make_replica_group(
        rendezvous,
        f"{formation}/replica/{replica}",
        rank=rank,
        dims=train.parallel.dims,
        device=device,
    )
    engine = Engine(
        task,
        train,
        slot=Slot(replica=replica, rank=rank, dims=train.parallel.dims),
        mesh=mesh,
        device=device,
        max_replicas=replicas,
    )
    engine.initialize()
    return engine


def make_lone_loop(
    rendezvous: Rendezvous,
    engine: Engine,
    link: Link,
    *,
    until: int,
    save_every: int | None = None,
    **more: Any,
) -> TrainLoop:
    """The steps of a worker alone, which has both lanes. Whoever makes it closes its `cross`.

    Args:
        rendezvous: of the engine.
        engine: the worker's.
        link: of the loop.
        until: steps of the run.
        save_every: see `LoopConfig`.
        more: goes to `TrainLoop`.
    """
    config = LoopConfig(
        lanes=2, save_every=save_every, compare_every=None, max_nonfinite_steps=1, until=until
    )
    cross = FabricGroup(
        GLOO, rendezvous, "cross", lanes=[(0, 1)], total_lanes=2, rank=0, leave_now=lambda: False
    )
    sums = engine.make_sums(2, 1)
    return TrainLoop(
        engine, cross, sums, lanes=(0, 1), progress=Progress(), config=config, link=link, **more
    )


def train_in_one_replica(
    rank: int, rendezvous: Rendezvous, task: PreparedTask, train: TrainConfig
) -> WorkerResult | Exception:
    """Trains as `rank` of the only replica, of one lane, on the CPU, in this process."""
    return train_at(
        rank,
        0,
        rendezvous,
        GLOO,
        task,
        train,
        replicas=1,
        lanes=1,
        saves=False,
    )


def train_at(
    index: int,
    formation: int,
    rendezvous: Rendezvous,
    fabric: Fabric,
    task: PreparedTask,
    train: TrainConfig,
    replicas: int,
    lanes: int,
    saves: bool,
    resumes: str = "",
) -> WorkerResult | Exception:
    """Trains at place `index`, in this process. What it returns keeps nothing of the replica."""
    replica, rank = divmod(index, train.parallel.workers)
    engine = make_engine(
        index,
        rendezvous,
        task,
        train,
        formation=formation,
        device=fabric.device,
        replicas=replicas,
    )
    dealt = deal_lanes(lanes, tuple(range(replicas)))
    cross = FabricGroup(
        fabric,
        rendezvous,
        f"{formation}/cross/{rank}",
        lanes=[dealt[r] for r in range(replicas)],
        total_lanes=lanes,
        rank=replica,
        leave_now=lambda: False,
    )
    link = SavingLink(replicas=replicas if saves else 0)
    progress = Progress(step=_restore(engine, resumes) if resumes else 0)
    loop = TrainLoop(
        engine,
        cross,
        engine.make_sums(lanes, replicas),
        lanes=dealt[replica],
        progress=progress,
        config=LoopConfig(
            lanes=lanes,
            save_every=None,
            compare_every=None,
            max_nonfinite_steps=2,
            until=train.steps,
        ),
        link=link,
    )
    error: Exception | None = None
    try:
        loop.run()
    except Exception as raised:
        error = raised
    boxes = engine.state.slices()

    def slices(tensors: Mapping[str, torch.Tensor]) -> Slices:
        return {
            name.removeprefix(PARAMETERS): (boxes[name].offsets, boxes[name].sizes, t.cpu().clone())
            for name, t in tensors.items()
            if name.startswith(PARAMETERS)
        }

    gradients = dict(
        zip(
            (PARAMETERS + name for name in engine.layout.names),
            engine.layout.views(engine.gradient),
            strict=True,
        )
    )
    return error or WorkerResult(
        buckets=len(engine.layout.buckets),
        losses=[c.loss for c in link.commits],
        norms=[c.grad_norm for c in link.commits],
        digests=[c.sample_digests for c in link.commits],
        evaluations=link.evaluations,
        times=link.times,
        own=link.own,
        local=slices(engine.state.tensors()),
        gradient=slices(gradients),
        saved=link.saved,
    )


def _restore(engine: Engine, where: str) -> int:
    """Fills the engine from the newest checkpoint of a store. Returns its step, of which none was
    skipped."""
    store = open_store(where)
    manifest = newest(store, Keys())
    assert manifest is not None
    parts = engine.state.to_read()
    boxes = [Box(part.name, part.offsets, part.sizes) for part in parts]
    values = Reader(store, manifest).read_many(boxes)
    named = {part.name: value for part, value in zip(parts, values, strict=True)}
    engine.load(named, optimizer_steps=manifest.step)
    return manifest.step


# Processes are forked from one that has imported all this already, also those of `member.py`: only
# the last such call of a session counts.
multiprocessing.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])


def run_in_turn(
    runs: Sequence[Run],
    *,
    orders: Sequence[Sequence[int]] | None = None,
    fabric: Fabric = GLOO,
) -> list[list[Any]]:
    """Trains one run after the other, on the same processes: as many as the largest has places.

    Args:
        runs: alike in `determinism` and `compile`, which are a process's.
        orders: of each, the place that each process takes; None: that of its number.
        fabric: what they run on.

    Returns:
        For each run a WorkerResult, or the exception, of every place.
    """
    orders = orders or [range(run.workers) for run in runs]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        running = mp.start_processes(
            _process,
            args=(store.port, runs, orders, fabric, results),
            nprocs=max(map(len, orders)),
            join=False,
            start_method="forkserver",
        )
        with killed_after(running):
            while not running.join():
                pass
        return [
            [pickle.loads(results[index, place]) for place in range(run.workers)]
            for index, run in enumerate(runs)
        ]


def run_layout(
    task: PreparedTask,
    train: TrainConfig,
    *,
    replicas: int,
    lanes: int,
    saves: bool = False,
    fabric: Fabric = GLOO,
) -> list[Any]:
    """Trains on `replicas` x shard x tensor fresh processes; the result of every worker."""
    run = Run(task=task, train=train, replicas=replicas, lanes=lanes, saves=saves)
    (results,) = run_in_turn([run], fabric=fabric)
    return results


def commit_save(workers: Sequence[WorkerResult], store: Store, step: int) -> Manifest:
    """Makes one checkpoint, in a store, of what the workers of a run have saved at its end."""
    saves = [worker.saved for worker in workers if worker.saved is not None]
    for _, objects in saves:
        for key, data in objects.items():
            store.put(key, [data])
    return commit(
        store,
        Keys(),
        step=step,
        generation=1,
        receipts=[receipt for receipt, _ in saves],
        training_state={},
        versions={},
    )


def assert_same_bits(one: WorkerResult, other: WorkerResult) -> None:
    """Both have trained and evaluated alike, and have the same parameters."""
    assert (other.losses, other.norms) == (one.losses, one.norms)
    assert other.evaluations == one.evaluations
    assert other.local.keys() == one.local.keys()
    for name, (_, _, value) in one.local.items():
        assert torch.equal(other.local[name][2], value), name


def full_parameters(workers: Sequence[WorkerResult]) -> dict[str, torch.Tensor]:
    """Puts the slices of a replica's workers together."""
    return _joined([worker.local for worker in workers])


def full_gradients(workers: Sequence[WorkerResult]) -> dict[str, torch.Tensor]:
    """Likewise, of the last step's gradient."""
    return _joined([worker.gradient for worker in workers])


def _joined(parts: Sequence[Slices]) -> dict[str, torch.Tensor]:
    full: dict[str, torch.Tensor] = {}
    for name in parts[0]:
        boxes = [part[name] for part in parts]
        shape = [max(o[d] + s[d] for o, s, _ in boxes) for d in range(len(boxes[0][0]))]
        full[name] = torch.full(shape, float("nan"))
        for offsets, sizes, value in boxes:
            full[name][tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = (
                value.reshape(sizes)
            )
    return full
