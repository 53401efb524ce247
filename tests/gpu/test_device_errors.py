"""A GPU's own errors: told by their code, and that they last."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fabric import NCCL, Fabric
from tests.support.processes import TIMEOUT_S, play
from trainer.backend.groups import make_replica_group
from trainer.backend.origin import lasting_device_error, origin_of
from trainer.backend.rendezvous import Rendezvous
from trainer.parallel.layout import ParallelDims

QUEUED = 32
"""All-reduces behind the kernel that fails."""
ANSWER_S = 0.3
"""c10d's watchdog looks every 0.1 s."""


def fail(number: int, port: int, fabric: Fabric) -> None:
    """Looks up what is not there: the kernel's own check ends the context for good."""
    fabric.enter(0, 1)
    found: list[Any] = [lasting_device_error()]
    table, index = torch.zeros(4, device="cuda"), torch.tensor([5], device="cuda")
    try:
        table[index].sum().item()
    except RuntimeError as error:
        found.append(origin_of(error))
    found.append(origin_of(dist.DistBackendError("unhandled cuda error")))
    dist.TCPStore("127.0.0.1", port).set("found", json.dumps(found))
    os._exit(0)  # what ends a process in order asks the device


@pytest.mark.gpu
def test_a_failed_check_in_a_kernel_lasts_and_is_no_group_s_error() -> None:
    store = play(fail, NCCL, processes=1)
    assert json.loads(store.get("found")) == [None, "assert", "assert"]


def fail_among_collectives(number: int, port: int, fabric: Fabric) -> None:
    """The same with all-reduces under way, whose ends c10d's watchdog asks for."""
    fabric.enter(0, 1)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cuda")
    table, index = torch.zeros(4, device="cuda"), torch.tensor([5], device="cuda")
    numbers, origin = torch.zeros(8, device="cuda"), "none"
    dist.all_reduce(numbers)  # connects
    torch.cuda.synchronize()
    try:
        fabric.hold_up()
        table[index].sum()
        for _ in range(QUEUED):
            dist.all_reduce(numbers, async_op=True)
        numbers.tolist()
    except RuntimeError as error:
        origin = origin_of(error)
    time.sleep(ANSWER_S)  # the watchdog's thread tells nobody when it has met the error
    dist.TCPStore("127.0.0.1", port).set("origin", origin)
    os._exit(0)


@pytest.mark.gpu
def test_a_device_s_error_is_told_by_the_worker_before_c10d_ends_its_process() -> None:
    store = play(fail_among_collectives, NCCL, processes=1)
    assert store.get("origin") == b"assert"


@pytest.mark.gpu
def test_memory_that_runs_out_passes() -> None:
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError) as out:
        torch.empty(2 * free, dtype=torch.uint8, device="cuda")
    assert origin_of(out.value) == "memory" and lasting_device_error() is None
