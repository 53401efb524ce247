"""One worker's step, built and run as it would be, on fake tensors and a fake process group.

The worker is the first one of its replica: no other has larger slices or more to gather. The
replica is the one whose lanes take most memory, mostly the first. Its step is the real one,
shortened: of its lanes only the last is computed, and of that lane two micro-batches, as further
ones add nothing to the peak; what they send and wait for is multiplied. Of the evaluation that
follows it is the first batch, for its memory alone: it is not compiled, and may take more than the
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.backend.groups import Device, without_peers
from trainer.config import TrainConfig
from trainer.dryrun.kernels import BESIDE
from trainer.dryrun.parts import REPLICAS, DryCross, DryEngine, DryLoop
from trainer.dryrun.reserve import spare_buffers, staged_bytes
from trainer.dryrun.shape import prepare_shape
from trainer.dryrun.watch import NODE, NODES, Watch
from trainer.engine.optimizer import try_optimizer
from trainer.loop.link import LoopConfig, NoLink, Progress
from trainer.parallel.compiled import compiled_by
from trainer.parallel.layout import ParallelDims, Slot
from trainer.parallel.mesh import ReplicaMesh
from trainer.parallel.two_level import TwoLevels
from trainer.replication.buckets import BUCKET_BYTES
from trainer.replication.lanes import deal_lanes, find_neediest, plan_lane_buffers
from trainer.replication.step_commit import LaneStats
from trainer.tasks.task import PreparedTask

_GRANULE_BYTES = {"cpu": 1, "cuda": 512}
"""What the allocators round up to."""

_MICRO_BATCHES = 2
"""Of a lane that are computed: one whose gradients begin, and one whose are added."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind in one group, in one step of one worker."""

    group: str
    """`shard`, `context`, `tensor`, `regather` (a number to reshard to), `replica` (all of one) or
    `replicas`; of two levels `nodes`, the same place on all of a replica's nodes, and `node`."""
    ranks: int
    """Workers in the group."""
    kind: str
    """Such as all_gather."""
    bytes: int
    """In all of them, of the larger of what goes in and what comes out."""
    count: int
    """How many."""


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """What one worker needs and sends."""

    components: dict[str, int]
    """Bytes alive at the peak of a step, by what they are for; see docs/dryrun.md."""
    evaluation_bytes: int = 0
    """Of tensors, at the peak of an evaluation; 0: nothing is held out."""
    fault_reserve_bytes: int
    """What the loss of a replica may add to that."""
    parameters: int
    """Numbers in the whole model."""
    collectives: tuple[Collective, ...]
    """Of one step."""
    host_syncs: int
    """How often in a step the host waits for a number of the device."""
    offloaded_bytes: int = 0
    """Of the host's memory, for this worker's activations (`TrainConfig.offload`)."""

    @property
    def peak_bytes(self) -> int:
        """Of tensors, in a step that nothing happens to."""
        return sum(self.components.values())


def dry_run(
    train: TrainConfig, *, replicas: int, device: Device, task: PreparedTask | None = None
) -> RankNeeds:
    """Runs one step of the first worker, and a batch of an evaluation. The process may be in no
    group.

    Args:
        train: what to learn.
        replicas: that there are.
        device: what the workers would have; here everything is on the CPU, and takes no memory.
        task: the run's, prepared; None: it is made, see `prepare_shape`.

    Raises:
        ConfigError: the settings cannot work.
    """
    lanes = train.lanes or replicas
    train.check(lanes)
    task = task or prepare_shape(train)
    counter = try_optimizer(train.optimizer)
    of_lane = train.lane_samples(lanes) // train.micro_samples(lanes)
    shown = min(of_lane, _MICRO_BATCHES)
    most = plan_lane_buffers(train.lane_buffers, lanes, replicas, device)
    bucket_bytes = train.bucket_bytes or BUCKET_BYTES[device]
    short = replace(
        train,
        lane_buffers=most,
        global_batch=lanes * train.parallel.shard * train.micro_samples(lanes) * shown,
        micro_batch=train.micro_samples(lanes),
        bucket_bytes=bucket_bytes,
        eval_samples=min(train.eval_samples, train.parallel.shard * train.micro_samples(lanes)),
    )
    watch = Watch(
        vocabulary=_vocabulary(task, train),
        granule=_GRANULE_BYTES[device],
        beside=BESIDE[device],
    )
    watch.levels = TwoLevels.of(train.parallel.dims)
    with _no_peers(train.parallel.dims, watch) as mesh:
        with (
            torch.random.fork_rng(devices=[]),
            _compiled(train),
            FakeTensorMode(allow_non_fake_inputs=True),
            watch,
        ):
            loop = _build(task, short, mesh, replicas, lanes, device, watch, counter)
            _step(loop, watch, times=of_lane / shown)
            components, host_syncs = watch.peak, watch.host_syncs
            collectives = _collectives(watch, train.parallel.dims, replicas)
            evaluation_bytes = _evaluation_bytes(loop, watch)
            flat_bytes = loop.engine.gradient.nbytes
            offloaded_bytes = loop.engine.offloaded_bytes
            parameters = sum(param.numel() for param in loop.engine.model.parameters())
        del loop
    return RankNeeds(
        components=components,
        evaluation_bytes=evaluation_bytes,
        fault_reserve_bytes=spare_buffers(lanes, replicas, device, most) * flat_bytes
        + staged_bytes(lanes, replicas, device, most, min(bucket_bytes, flat_bytes)),
        parameters=parameters,
        collectives=collectives,
        host_syncs=host_syncs,
        offloaded_bytes=offloaded_bytes,
    )


def _compiled(train: TrainConfig) -> AbstractContextManager[None]:
    """Has what would be compiled counted as such. The driver of another run is spared what is
    imported for it."""
    if train.compile == "off":
        return nullcontext()
    from trainer.dryrun.fused import make_backend

    return compiled_by(make_backend())


def _vocabulary(task: PreparedTask, train: TrainConfig) -> set[int]:
    """Sizes that logits may have: whole, and a tensor rank's part."""
    size = getattr(task, "config", {}).get("vocab_size")
    return set() if size is None else {size, size // train.parallel.tensor}


@contextmanager
def _no_peers(dims: ParallelDims, watch: Watch) -> Iterator[ReplicaMesh]:
    """The replica's groups, which `watch` is told of."""
    with without_peers(dims, "cpu") as made:
        named = {**made.others, "shard": made.fsdp}  # which may be the group of another one
        if made.tensor is not None:
            named["tensor"] = made.tensor
        if made.regather is not None:
            regather = made.regather.mesh_dim_names
            assert regather is not None
            named["regather"] = made.regather[regather[-1]]
        watch.groups = {dist.distributed_c10d._get_default_group().group_name: "replica"}
        watch.groups |= {m.get_group().group_name: n for n, m in named.items() if m.size() > 1}
        yield made


def _build(
    task: PreparedTask,
    train: TrainConfig,
    mesh: ReplicaMesh,
    replicas: int,
    lanes: int,
    device: Device,
    watch: Watch,
    counter: torch.Tensor | None,
) -> DryLoop:
    dealt = deal_lanes(lanes, tuple(range(replicas)))
    own = find_neediest(dealt, lanes)
    engine = DryEngine(
        task,
        train,
        slot=Slot(replica=own, rank=0, dims=train.parallel.dims),
        mesh=mesh,
        device="cpu",
        max_replicas=replicas,
        watch=watch,
        counter=counter,
    )
    engine.forget_initial_weights()
    cross = DryCross(
        watch=watch,
        gathers=device == "cuda",
        lanes=[dealt[replica] for replica in range(replicas)],
        total_lanes=lanes,
        rank=own,
    )
    config = LoopConfig(
        lanes=lanes, save_every=None, compare_every=None, max_nonfinite_steps=1, until=1
    )
    return DryLoop(
        engine,
        cross,
        engine.make_sums(lanes, replicas),
        lanes=dealt[own],
        progress=Progress(),
        config=config,
        link=NoLink(),
        watch=watch,
    )


def _step(loop: DryLoop, watch: Watch, *, times: float) -> None:
    """A step, of which the last lane alone is computed.

    Args:
        loop: the worker's.
        watch: counts what it does.
        times: micro-batches of a lane, for each that is computed here.
    """
    watch.host_syncs = 0  # those of a start
    home, alone = loop.engine.gradient, loop.cross.size == 1
    *before, last = loop.sums.begin(0, loop.lanes, home, alone=alone)
    no_loss = torch.zeros((), dtype=torch.float64)
    for lane in before:
        loop.sums.open(lane)
        loop.sums.settle(loop.engine.layout.count)
        loop.sums.close(lane, LaneStats(tokens=0, digest=0), no_loss)
    reduction = loop.make_reduction()
    loop.begin_reading(0, [last])
    loop.compute_lane(0, last, reduction)
    _multiply(watch, times * len(loop.lanes))
    reduction.finish()
    commit = loop.agree(0, failed=False, overwritten=True, witnessed=())
    assert commit is not None
    loop.finish_step(commit)


def _evaluation_bytes(loop: DryLoop, watch: Watch) -> int:
    """The peak of the first batch of an evaluation, which follows a step; no other is larger. 0
    where nothing is held out."""
    if not loop.due.batches():
        return 0
    watch.forget_peak()
    loop.due.evaluate()
    return sum(watch.peak.values())


def _multiply(watch: Watch, factor: float) -> None:
    """Counts what was sent inside the replica, and what the host waited for, so many times."""
    watch.host_syncs = round(watch.host_syncs * factor)
    for counter in (watch.calls, watch.call_bytes):
        for call in counter:
            if call.group != REPLICAS:
                counter[call] = round(counter[call] * factor)


def _collectives(watch: Watch, dims: ParallelDims, replicas: int) -> tuple[Collective, ...]:
    ranks = {
        **dims.degrees,
        "shard": dims.fsdp,
        NODES: dims.nodes,
        NODE: dims.fsdp // dims.nodes,
        "regather": dims.regathered,
        "replica": dims.workers,
        REPLICAS: replicas,
    }
    return tuple(
        Collective(
            group=call.group,
            ranks=ranks[call.group],
            kind=call.kind,
            bytes=watch.call_bytes[call],
            count=count,
        )
        for call, count in sorted(watch.calls.items())
    )
