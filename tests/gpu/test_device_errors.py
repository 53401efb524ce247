"""A GPU's own errors: told by their code, and that they last."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fabric import NCCL, Fabric
from tests.support.processes import play
from trainer.backend.origin import lasting_device_error, origin_of


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


@pytest.mark.gpu
def test_memory_that_runs_out_passes() -> None:
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError) as out:
        torch.empty(2 * free, dtype=torch.uint8, device="cuda")
    assert origin_of(out.value) == "memory" and lasting_device_error() is None
