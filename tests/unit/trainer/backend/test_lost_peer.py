"""One of a replica of four dies or raises in the middle of a step: all others notice, and keep
nothing of the replica that would hold up one another."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.support.data_plane import train_in_one_replica
from trainer.backend.groups import leave_replica_group
from trainer.backend.origin import origin_of
from trainer.backend.rendezvous import Rendezvous
from trainer.config import ParallelConfig, TrainConfig
from trainer.tasks.causal_lm import PreparedCausalLM

LOST, SURVIVORS = 3, (0, 1, 2)
NOTICED_S, TIMEOUT_S = 5.0, 30.0
FLAT = ParallelConfig(shard=2, tensor=2)
TWO_LEVELS = ParallelConfig(shard=4, workers_per_node=2)
RING = ParallelConfig(context=4)


def end_at(moment: str, store: dist.TCPStore, *, raises: bool) -> None:
    """Has this process end, or raise, when it is in the named kind of module, forward or
    backward."""
    kind, _, direction = moment.partition(" ")

    def is_it(module: nn.Module, now: str) -> bool:
        """FSDP2 gives the modules that it shards a class of their own."""
        return now == direction and kind in [c.__name__ for c in type(module).__mro__]

    def end(*_: Any) -> None:
        store.set("gone", str(time.monotonic()))
        if raises:
            raise RuntimeError("the user's own, which says gloo and nccl")
        os._exit(0)

    def entered(module: nn.Module, _: Any) -> None:
        if is_it(module, "forward"):
            end()

    def passed(module: nn.Module, _: Any, output: Any) -> None:
        if is_it(module, "backward") and output.requires_grad:
            output.register_hook(end)

    register_module_forward_pre_hook(entered)
    register_module_forward_hook(passed)


def train_or_end(
    rank: int, port: int, task: PreparedCausalLM, train: TrainConfig, moment: str, raises: bool
) -> None:
    """One place; the survivors stay alive, as a process that ends wakes its peers."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    if rank == LOST:
        end_at(moment, store, raises=raises)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    result = train_in_one_replica(rank, meet, task, train)
    assert isinstance(result, Exception)
    if rank == LOST:
        assert (origin_of(result), type(result)) == ("code", RuntimeError), result
        os._exit(0)  # as a worker does
    assert origin_of(result) == "group", result
    noticed_s = time.monotonic() - float(store.get("gone"))
    del result  # its frames hold the replica
    gc.collect()
    leave_replica_group()
    in_flight = c10d._get_work_registry_size()
    store.set(f"rank {rank} left", "")
    store.wait([f"rank {other} left" for other in SURVIVORS], timedelta(seconds=2 * TIMEOUT_S))
    assert (in_flight, noticed_s < NOTICED_S) == (0, True), (in_flight, noticed_s)


@pytest.mark.parametrize(
    ("moment", "raises", "layout"),
    [
        ("LlamaDecoderLayer forward", False, FLAT),  # the embeddings are not yet looked at
        ("LlamaMLP backward", True, FLAT),
        ("LlamaMLP backward", False, TWO_LEVELS),
        ("LlamaAttention forward", False, RING),  # its peers wait for keys and values
        ("LlamaMLP backward", False, RING),
    ],
)
def test_all_notice_at_once(
    text: Path, tmp_path: Path, moment: str, raises: bool, layout: ParallelConfig
) -> None:
    from tests.support.tiny import tiny_task, tiny_train  # not in the processes: it imports Ray

    train = tiny_train(text, parallel=layout, steps=2, lanes=1)
    task = tiny_task(text).prepare(train, str(tmp_path))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(
        train_or_end,
        args=(store.port, task, train, moment, raises),
        nprocs=4,
        start_method="forkserver",
    )
    assert store.check(["gone"])
