"""A replica's group can be left while it is made; and so that a peer that waits in it wakes up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from tests.support.data_plane import train_in_one_replica
from trainer.backend import groups
from trainer.backend.groups import leave_replica_group, make_replica_group, without_peers
from trainer.backend.origin import origin_of
from trainer.backend.polling import LEFT
from trainer.backend.rendezvous import Rendezvous
from trainer.backend.silence import Connections
from trainer.config import ParallelConfig, TrainConfig
from trainer.parallel.layout import ParallelDims
from trainer.tasks.custom import CustomTask

PATIENCE = timedelta(seconds=20)
"""Far less than the group's own timeout."""
SHORT = timedelta(seconds=4)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(), len(batch)


def leave_or_wait(rank: int, port: int) -> None:
    """Both ranks train; then one leaves and stays alive until the other, who waits for it in a
    collective, has woken."""
    torch.set_num_threads(1)
    task = CustomTask(build_model=build_model, loss_function=loss_of, dataset=torch.ones(8, 6))
    train = TrainConfig(task=task, steps=2, global_batch=2, parallel=ParallelConfig(shard=2))
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=300)
    result = train_in_one_replica(rank, meet, task, train)
    assert not isinstance(result, Exception), result
    store = dist.TCPStore("127.0.0.1", port)
    if rank == 1:
        leave_replica_group()
        store.wait(["woken"], PATIENCE)
        return
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    store.set("woken", "")
    leave_replica_group()


def test_a_peer_of_one_that_leaves_wakes_up() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(leave_or_wait, args=(store.port,), nprocs=2, start_method="forkserver")


def make_group(port: int, prefix: str, rank: int, leave_now: Callable[[], bool] = bool) -> None:
    """This worker's part of a replica of 2 x 2."""
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=PATIENCE.total_seconds())
    make_replica_group(
        meet,
        prefix,
        rank=rank,
        dims=ParallelDims(shard=2, tensor=2),
        device="cpu",
        leave_now=leave_now,
    )


def meet_again(port: int, rank: int) -> None:
    """The three that left and one that is new make a replica."""
    make_group(port, "again", rank)
    alive = torch.ones(1)
    dist.all_reduce(alive)
    assert alive == 4
    leave_replica_group()


def die_or_leave(rank: int, port: int, moment: str) -> None:
    """Rank 1 of 2 x 2 ends in the middle of what all make, when the others are in it as well; they
    hear nothing but the call of the coordinator. Process 4 takes its place."""
    store = dist.TCPStore("127.0.0.1", port)
    if rank == 4:
        store.wait(["rank 1 is gone"], PATIENCE)
        return meet_again(port, 1)
    owner = groups if hasattr(groups, moment) else dist
    make = getattr(owner, moment)

    def begin(*args: Any, **options: Any) -> Any:
        store.set(f"rank {rank} begins", "")
        if rank == 1:
            store.wait([f"rank {other} begins" for other in (0, 2, 3)], PATIENCE)
            store.set("rank 1 is gone", "")
            os._exit(0)
        return make(*args, **options)

    setattr(owner, moment, begin)
    with pytest.raises(RuntimeError, match=LEFT):
        make_group(port, "replica", rank, lambda: store.check(["rank 1 is gone"]))
    leave_replica_group()
    assert not dist.is_initialized()
    meet_again(port, rank)


@pytest.mark.parametrize("moment", ["init_process_group", "init_device_mesh"])
def test_a_peer_that_dies_while_the_group_is_made_holds_nobody_up(moment: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(die_or_leave, args=(store.port, moment), nprocs=5, start_method="forkserver")


def test_who_is_alone_is_asked_while_a_thread_leaves_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a build beside the steps was given up."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # so it was a moment ago
    assert not groups._alone()


def wait_in_vain(rank: int, port: int, dims: ParallelDims) -> None:
    """Rank 0 of 2 x 2 is alone in a collective of each of its groups."""
    store = dist.TCPStore("127.0.0.1", port)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=SHORT.total_seconds())
    mesh = make_replica_group(meet, "replica", rank=rank, dims=dims, device="cpu")
    if rank == 0:
        made = [mesh.fsdp, *mesh.others.values(), *([mesh.tensor] if mesh.tensor else [])]
        waited_in = {dist.group.WORLD, *(each.get_group() for each in made)}
        assert len(waited_in) == (3 if dims.tensor > 1 else 2)
        works = [dist.all_reduce(torch.ones(1), group=g, async_op=True) for g in waited_in]
        assert origin_of(RuntimeError("the user's own")) == "code"
        for work in works:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out") as late:
                work.wait()
            assert origin_of(late.value) == "group"
        store.set("over", "")
    store.wait(["over"], PATIENCE)
    leave_replica_group()


@pytest.mark.parametrize(
    "dims",
    [ParallelDims(shard=2, tensor=2), ParallelDims(shard=2, others=(("context", 2),))],
    ids=str,
)
def test_all_groups_of_a_replica_have_the_timeout(dims: ParallelDims) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(wait_in_vain, args=(store.port, dims), nprocs=4, start_method="forkserver")


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        (ParallelDims(), {}),
        (ParallelDims(shard=4), {}),
        (ParallelDims(tensor=4), {"fsdp": [0]}),
        (ParallelDims(shard=2, tensor=3), {"fsdp": [0, 3], "tensor": [0, 1, 2]}),
        (ParallelDims(others=(("context", 4),)), {}),
        (ParallelDims(shard=2, others=(("context", 3),)), {"context": [0, 1, 2]}),
        (ParallelDims(shard=4, regather=2), {"apart": [0, 2], "regather": [0, 1]}),
        (
            ParallelDims(shard=2, others=(("context", 3), ("pipe", 2)), tensor=2),
            {
                "fsdp": [*range(0, 24, 2)],
                "tensor": [0, 1],
                "context": [0, 4, 8],
                "pipe": [0, 2],
            },
        ),
    ],
    ids=str,
)
def test_no_group_is_made_that_nobody_uses(
    dims: ParallelDims, expected: dict[str, list[int]]
) -> None:
    """By the names that flight recordings have; beside the replica's own."""
    with without_peers(dims, "cpu") as mesh:
        made = [each for each in dist.distributed_c10d._world.pg_map if each != dist.group.WORLD]
        found = {each.group_desc: dist.get_process_group_ranks(each) for each in made}
        assert found == {f"mesh_{n} without peers": ranks for n, ranks in expected.items()}
        assert len(made) == len(expected)
        for name, degree in dims.others:
            assert (mesh.others[name].size(), mesh.others[name].ndim) == (degree, 1)
        assert (mesh.tensor is None) == (dims.tensor == 1)
        assert mesh.fsdp.size() == dims.fsdp


KEPT = """
import torch.distributed as dist
from trainer.backend import groups
from trainer.backend.rendezvous import Rendezvous
from trainer.backend.silence import Connections
from trainer.parallel.layout import ParallelDims

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=20)
groups.make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
from torch.distributed.fsdp import fully_shard
import torch.distributed.nn.functional as functional

assert functional.broadcast.__defaults__ == (None,), functional.broadcast.__defaults__
groups.leave_replica_group()
"""


def test_a_late_import_of_fsdp_does_not_keep_the_group() -> None:
    """In a process that has imported as little as can be."""
    subprocess.run([sys.executable, "-c", KEPT], check=True)


SPLIT = """
import torch
import torch.distributed as dist
from trainer.backend import groups
from trainer.backend.rendezvous import Rendezvous
from trainer.backend.silence import Connections
from trainer.parallel.layout import ParallelDims

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=20)
for formation in range(2):
    groups.make_replica_group(
        meet, f"replica/{formation}", rank=0, dims=ParallelDims(), device="cpu"
    )
    whole = dist.group.WORLD
    options = whole._get_backend(torch.device("cpu")).options
    part = whole.split_group([0], opts=options, group_name=f"part {formation}", group_desc="")
    assert part.size() == 1
    del part, whole
    groups.leave_replica_group()
"""


def test_a_replica_that_is_formed_again_can_be_split() -> None:
    """As its mesh does on NCCL: c10d would end the process with a SIGSEGV, on Gloo, too."""
    subprocess.run([sys.executable, "-c", SPLIT], check=True)


def test_of_a_group_that_an_abort_has_ended_no_connection_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else an error of the user's code would be taken for a lost peer's."""
    monkeypatch.setattr(groups, "_connections", Connections([1]))
    assert origin_of(RuntimeError("user")) == "group"
    leave_replica_group()
    assert origin_of(RuntimeError("user")) == "code"
