"""One rank of a group that sums up whole numbers: is the sum right, and how fast is it?

    python -m elastic.doctor.loads.all_reduce --store file:/tmp/meet --rank 0 --size 2 --device cpu

The store is a file of this machine, or `tcp:HOST:PORT/PREFIX`, which others reach, too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.backend.efa_facts import read_efa
from trainer.backend.efa_settings import plan_efa
from trainer.backend.interface import listen_towards

SIZES_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
_TRIES = 5
_PERIOD = 16
"""The numbers come again after so many: their sum over a thousand ranks is exact in float32."""

MEET_S = 60.0
"""How long the others may take to start."""
_CARRY_S = {"cpu": 15.0, "cuda": 60.0}
"""Bound on connecting, and on a sum, once all are there. What NCCL takes to start is in it."""


def measure(rank: int, size: int, device: torch.device) -> dict[str, float]:
    """Sums up over the default group. All of its ranks call it. Returns how many of the sums were
    `wrong`, and `bus`, the bytes per second of the bus (nccl-tests: 2 (n - 1) / n of the buffer),
    the best of `_TRIES`."""
    count = SIZES_BYTES[device.type] // 4
    numbers = torch.arange(count, device=device) % _PERIOD
    exact = (size * numbers + size * (size - 1) // 2).float()
    wrong, durations = 0, []
    for _ in range(1 + _TRIES):  # the first one connects
        buffer = (numbers + rank).float()
        _settle(device)
        begin_s = time.perf_counter()
        dist.all_reduce(buffer)
        _settle(device)
        durations.append(time.perf_counter() - begin_s)
        wrong += int(not torch.equal(buffer, exact))
    return {"wrong": wrong, "bus": 2 * (size - 1) / size * 4 * count / min(durations[1:])}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def open_meeting(where: str, size: int) -> Any:
    """The store of that name, as torch has it; Gloo listens towards it."""
    kind, _, place = where.partition(":")
    if kind == "file":
        listen_towards("127.0.0.1", 1)
        return dist.FileStore(place, size)
    address, _, prefix = place.partition("/")
    host, _, port = address.rpartition(":")
    listen_towards(host, int(port))
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=MEET_S))
    return dist.PrefixStore(prefix, store)


def await_all(store: Any, size: int) -> None:
    """Returns once all ranks are here; all of them call it."""
    if store.add("count", 1) == size:
        store.set("all", "")
    store.wait(["all"], timedelta(seconds=MEET_S))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    options = parser.parse_args()
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
        os.environ.update(plan_efa(read_efa(), os.environ).missing)
    meeting = open_meeting(options.store, options.size)
    await_all(meeting, options.size)
    dist.init_process_group(
        "nccl" if options.device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", meeting),
        rank=options.rank,
        world_size=options.size,
        timeout=timedelta(seconds=_CARRY_S[options.device.type]),
    )
    result = measure(options.rank, options.size, options.device)
    print(json.dumps({"result": result}), flush=True)
    # A rank that is done may not close what the others still read. Without its device torch warns.
    dist.barrier(device_ids=[options.device.index] if options.device.type == "cuda" else None)
    os._exit(0)
