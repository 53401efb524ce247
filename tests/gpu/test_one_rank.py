"""One rank on a device: its groups, the sum of its lanes, its steps, and a save of its state."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpointing import Attempt, Keys, Reader, commit, open_store, write_shared
from health.flight import entries_of, has_ended
from tests.support.data_plane import Run, make_engine, run_in_turn, train_at
from tests.support.fabric import GLOO, NCCL, Fabric, on
from tests.support.lane_gradients import COUNT, ENDS, PADDING, lane_gradients
from tests.support.member import LANES, small_task, small_train
from tests.support.tiny import tiny_train, write_text
from trainer.backend.aside import GLOO as GLOO_ASIDE
from trainer.backend.flight_recorder import read_flight_recorder
from trainer.backend.groups import (
    abort_groups,
    check_replica_group,
    leave_replica_group,
    make_replica_group,
    replica_connections,
    torch_device,
)
from trainer.backend.rendezvous import Rendezvous
from trainer.config import ParallelConfig
from trainer.engine.host_copy import HostBuffer
from trainer.engine.shared_copy import open_copy
from trainer.loop.compile_ahead import compile_ahead, rehearse
from trainer.parallel.layout import ParallelDims
from trainer.recovery.shared_restore import Restored, read_together
from trainer.replication.lane_sums import LaneSums
from trainer.replication.reduction import Reduction
from trainer.replication.replicas import CrossGroup
from trainer.replication.step_commit import LaneStats


@pytest.fixture
def meet() -> Iterator[Rendezvous]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    leave_replica_group()


def whole_cross_group(meet: Rendezvous, fabric: Fabric, *, lanes: int) -> CrossGroup:
    """That of the only replica, which has all lanes."""
    return CrossGroup(
        meet,
        "cross",
        lanes=[tuple(range(lanes))],
        total_lanes=lanes,
        rank=0,
        device=fabric.device,
        leave_now=lambda: False,
    )


@on(GLOO, NCCL)
def test_a_group_is_made_anew_after_an_abort(meet: Rendezvous, fabric: Fabric) -> None:
    for formation in range(3):
        mesh = make_replica_group(
            meet, f"replica/{formation}", rank=0, dims=ParallelDims(), device=fabric.device
        )
        assert dist.get_backend() == ("nccl" if fabric.device == "cuda" else GLOO_ASIDE)
        numbers = torch.arange(4.0, device=torch_device(fabric.device))
        for group in (None, mesh.fsdp.get_group()):
            dist.all_reduce(numbers, group=group)
        assert numbers.tolist() == [0, 1, 2, 3]
        check_replica_group()
        for end in abort_groups(replica=replica_connections()):
            end.result()
        if fabric.device == "cuda":
            with pytest.raises(RuntimeError, match="aborted"):
                check_replica_group()
        leave_replica_group()
        assert not dist.is_initialized()


def let_wait(numbers: torch.Tensor) -> None:
    """Waits for the device."""
    numbers.tolist()


def fill_the_launch_queue(numbers: torch.Tensor) -> None:
    """More kernels than the device takes before it has done some: the last launches wait."""
    for _ in range(5000):
        numbers.add_(1)


def give_memory_back(numbers: torch.Tensor) -> None:
    """To the device, which first does all that it was given."""
    del numbers
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("meanwhile", [let_wait, fill_the_launch_queue, give_memory_back])
def test_nccl_s_recording_is_read_while_the_device_is_busy(
    meet: Rendezvous, meanwhile: Callable[[torch.Tensor], None]
) -> None:
    """And another thread is in a call of CUDA's."""
    prefix = f"replica/{meanwhile.__name__}"  # what others have begun before is recorded, too
    make_replica_group(meet, prefix, rank=0, dims=ParallelDims(), device="cuda")
    numbers = torch.zeros(1237, device=torch_device("cuda"))
    spare = torch.empty(1 << 28, dtype=torch.uint8, device=numbers.device)
    dist.all_reduce(numbers)
    numbers.tolist()
    del spare
    torch.cuda._sleep(4_000_000_000)  # two seconds
    dist.all_reduce(numbers)
    waits = threading.Thread(target=meanwhile, args=(numbers,))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive(), "nothing waits for the device"
    begun_s = time.monotonic()
    recorded = read_flight_recorder("cuda")
    took_s = time.monotonic() - begun_s
    assert not torch.cuda.current_stream().query(), "the device has not been busy for long enough"
    waits.join()
    assert took_s < 0.2
    of_all = entries_of(recorded.decode())
    mine = [one for one in of_all if one["process_group"][1] == f"the replica {prefix}"]
    assert [(one["profiling_name"], has_ended(one)) for one in mine] == [
        ("nccl:all_reduce", True),
        ("nccl:all_reduce", False),
    ]


SYNCHRONIZED = "called a synchronizing CUDA operation"
"""How torch tells of one (c10/cuda/CUDAFunctions.cpp)."""


@contextlib.contextmanager
def counting_syncs() -> Iterator[list[str]]:
    """What torch itself says of calls that wait for the device: a line for each."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found += [
            f"{one.filename}:{one.lineno}" for one in told if SYNCHRONIZED in str(one.message)
        ]


@pytest.mark.gpu
def test_the_host_waits_for_the_device_once_in_a_step(meet: Rendezvous, tmp_path: Path) -> None:
    """However many micro-batches it has. `test_host_syncs.py` counts calls of ours on a CPU; this
    is what torch sees, in autograd's thread and in the loader's, too: copies that wait, and a
    stream's `synchronize`, not an event's."""
    text, counts = write_text(tmp_path / "text"), {}
    runs = [(steps, micro_batch) for micro_batch in (4, 1) for steps in (1, 3)]
    for formation, (steps, micro_batch) in enumerate(runs):
        train = tiny_train(text, steps=steps, micro_batch=micro_batch, lanes=1)
        task = train.task.prepare(train, str(tmp_path / "cache"))
        with counting_syncs() as found:
            train_at(0, formation, meet, NCCL, task, train, replicas=1, lanes=1, saves=False)
        leave_replica_group()
        counts[steps, micro_batch] = Counter(found)
    for micro_batch in (4, 1):  # the start, the evaluation and the end aside
        long, short = counts[3, micro_batch], counts[1, micro_batch]
        assert long.total() - short.total() == 2, (long - short, short - long)


@pytest.mark.parametrize("most", [None, 1], ids=["on the device", "on the host"])
@on(GLOO, NCCL)
def test_lanes_are_added_up_beside_the_current_stream(
    meet: Rendezvous, fabric: Fabric, most: int | None
) -> None:
    """In the order of the tree, not before the gradients are there, and with no wait in
    backward; also where lanes wait on the host."""
    gradients, device = lane_gradients(3), torch_device(fabric.device)
    expected = (gradients[0] + gradients[1]) + gradients[2]
    ready = [gradient.to(device) for gradient in gradients]
    cross = whole_cross_group(meet, fabric, lanes=3)
    sums = LaneSums(3, COUNT + PADDING, device, most=most)
    into = torch.full((COUNT + PADDING,), torch.nan, device=device)

    def begin(step: int) -> Reduction:
        """The gradients come in as two groups of parameters, the last lane's with the sum."""
        lanes = sums.begin(step, (0, 1, 2), into, alone=True)
        reduction = Reduction(cross, sums.blocks, into, ENDS, exact=True)
        for lane in lanes:
            flat = sums.open(lane)
            for part in (slice(0, 500), slice(500, COUNT)):
                flat[part] = ready[lane][part]
                sums.settle(part.stop)
                if lane == lanes[-1]:
                    reduction.start(part.stop)
            sums.close(lane, LaneStats(tokens=1, digest=0), torch.zeros((), device=device))
        return reduction

    fabric.hold_up()
    begin(0).finish()
    assert into[:COUNT].cpu().numpy().tobytes() == expected.numpy().tobytes()

    into.fill_(torch.nan)
    with cross.on_stream():
        fabric.hold_up()
    reduction = begin(1)
    if fabric.device == "cuda":
        torch.cuda.current_stream().synchronize()
        assert not cross.stream.query(), "what backward queues has waited for the sum"
    reduction.finish()
    assert into[:COUNT].cpu().numpy().tobytes() == expected.numpy().tobytes()


@on(GLOO, NCCL)
def test_a_worker_rehearses_before_it_has_peers(
    meet: Rendezvous, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of four, and becomes a replica of its own then."""
    sharded = replace(small_train(4), parallel=ParallelConfig(shard=4), global_batch=4 * LANES)
    rehearse(small_task(), sharded, lanes=LANES, max_replicas=1, device=fabric.device)
    assert "rehearsal" not in caplog.text
    engine = make_engine(0, meet, small_task(), small_train(4), device=fabric.device)
    compile_ahead(engine, LANES)


@on(GLOO, NCCL)
def test_steps_repeat_their_bits(fabric: Fabric) -> None:
    """In a replica that is made anew in the same process."""
    run = Run(task=small_task(), train=small_train(4), replicas=1, lanes=LANES)
    (first,), (second,) = run_in_turn([run, run], fabric=fabric)
    assert len(first.losses) == 4 and first.losses[3] < first.losses[0]
    assert (first.losses, first.norms) == (second.losses, second.norms)
    for name, (_, _, weights) in first.local.items():
        assert torch.equal(weights, second.local[name][2]), name


@on(GLOO, NCCL)
def test_a_copy_restores_the_bits_that_were_copied(
    meet: Rendezvous, fabric: Fabric, tmp_path: Path
) -> None:
    """The next step is queued before the copy is there."""
    engine = make_engine(0, meet, small_task(), small_train(4), device=fabric.device)
    engine.gradient.normal_()
    engine.apply(0, scale=1.0)
    saved = engine.state.digest()
    share = engine.state.share(0, 1)
    buffer = HostBuffer(share.size_bytes, engine.device)
    copy = engine.state.copy_to(buffer, share)
    engine.gradient.normal_()
    engine.apply(1, scale=1.0)
    copy.wait()
    store, keys = open_store(tmp_path / "store"), Keys()
    attempt = Attempt(rank=0, step=1, generation=1)
    with open_copy(os.getpid(), buffer.fd, buffer.number) as memory:
        receipt = write_shared(store, keys, attempt, share.slices, memory)
    buffer.close()
    manifest = commit(
        store,
        keys,
        step=1,
        generation=1,
        receipts=[receipt],
        training_state={"optimizer_steps": 1, "skipped_in_a_row": 0},
        versions={},
    )
    assert engine.state.digest() != saved
    cross = whole_cross_group(meet, fabric, lanes=1)
    read = read_together(engine, cross, lambda: (Reader(store, manifest), manifest.training_state))
    assert isinstance(read, Restored)
    engine.load(read.values, optimizer_steps=read.optimizer_steps)
    assert engine.state.digest() == saved and engine.state.optimizer_steps == 1
