"""One worker of `benchmarks.collectives`, in the network namespace that is its node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.support.hosts import enter
from trainer.backend.groups import make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.parallel.backward import flat_reduce_scatter
from trainer.parallel.layout import ParallelDims
from trainer.parallel.two_level import TwoLevels

PORT = 7001
_TIMEOUT_S = 900.0
_AHEAD_S = 0.15
"""Until a turn begins, after the first worker has said when: longer than that takes to arrive."""
_PINGS, _BULK_BYTES = 15, 4 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one run."""

    namespaces: Sequence[str]
    """One for each node."""
    here: int
    """Workers on each."""
    host: str
    """Address of the first node, for the store."""
    size_bytes: int
    """Of a whole buffer."""
    turns: int
    """Timed ones."""


def work(rank: int, settings: Settings, folder: Path) -> None:
    """Measures, and writes what it found as JSON to a file with its rank's number in `folder`."""
    nodes, here = len(settings.namespaces), settings.here
    enter(settings.namespaces[rank // here])
    torch.set_num_threads(1)
    if rank == 0:  # kept until the end
        store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
        assert store
    meet = Rendezvous(host=settings.host, port=PORT, timeout_s=_TIMEOUT_S)
    dims = ParallelDims(shard=nodes * here)
    began = time.monotonic()
    make_replica_group(meet, "one", rank=rank, dims=dims, device="cpu")
    found: dict[str, Any] = {"group_s": time.monotonic() - began}
    began = time.monotonic()
    for mine in _sub_groups(nodes, here):
        dist.new_group(mine)
    found["sub_groups_s"] = time.monotonic() - began
    found |= _measure_links(rank, here)
    found["times_s"] = _measure(rank, nodes, here, settings.size_bytes, settings.turns)
    (folder / str(rank)).write_text(json.dumps(found))
    dist.barrier()


def _sub_groups(nodes: int, here: int) -> list[list[int]]:
    """What collectives on a group for each level would need; ranks come node by node."""
    across = [[node * here + local for node in range(nodes)] for local in range(here)]
    return [*across, *([*range(node * here, (node + 1) * here)] for node in range(nodes))]


def _measure_links(rank: int, here: int) -> dict[str, float]:
    """Seconds one way of a few bytes, between the first two nodes and inside the first, and bytes
    a second between them. The others wait."""
    found = {
        "alpha_s": _one_way_s(rank, here, torch.zeros(1), _PINGS),
        "inside_alpha_s": _one_way_s(rank, 1, torch.zeros(1), _PINGS),
    }
    bulk = torch.zeros(_BULK_BYTES // 4)
    bulk_s = min(_one_way_s(rank, here, bulk, 3), 1e9) - found["alpha_s"]
    return {**found, "node_bytes_s": _BULK_BYTES / bulk_s if rank == 0 else 0.0}


def _one_way_s(rank: int, peer: int, data: torch.Tensor, repeats: int) -> float:
    """Half a round trip between the first worker and `peer`: the median."""
    dist.barrier()
    times = []
    for _ in range(repeats + 1):  # the first does not count
        began = time.monotonic()
        if rank == 0:
            dist.send(data, peer)
            dist.recv(data, peer)
        elif rank == peer:
            dist.recv(data, 0)
            dist.send(data, 0)
        times.append((time.monotonic() - began) / 2)
    return sorted(times[1:])[repeats // 2]


def _measure(
    rank: int, nodes: int, here: int, size_bytes: int, turns: int
) -> dict[str, list[float]]:
    """Seconds of each turn of each way, from a moment that all agree on until this worker is done.

    Flat collectives have the ranks node by node, which is best for their ring; those in two levels
    have them as the module says.
    """
    flat = dist.distributed_c10d._get_default_group()
    order = ParallelDims(shard=nodes * here, nodes=nodes).by_rank(range(nodes * here))
    group = dist.new_group([*order], sort_ranks=False)
    levels = TwoLevels(nodes=nodes)
    count = size_bytes // 4 // (nodes * here)
    whole, expected = torch.empty(2, count * nodes * here)
    addends, part = torch.randn(count * nodes * here), torch.empty(count)
    total = torch.empty(count)
    own = whole[group.rank() * count :][:count]

    ways: dict[str, Callable[[], object]] = {
        "flat_all_gather": lambda: dist.all_gather_into_tensor(expected, part, group=flat),
        "two_level_all_gather": lambda: levels.all_gather(whole, group),
        "flat_reduce_scatter": lambda: flat_reduce_scatter(
            total, addends, group=flat, op=dist.ReduceOp.SUM
        ),
        "two_level_reduce_scatter": lambda: levels.reduce_scatter(total, addends, group),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, run in ways.items():
            part.fill_(rank)
            own.fill_(rank)
            addends.fill_(1.0)
            start = _agree()
            run()
            if turn:
                times[way].append(time.monotonic() - start)
        _check(whole, expected, total, order)
    return times


def _agree() -> float:
    """A moment of this machine's clock at which all begin."""
    dist.barrier()
    moment = torch.tensor([time.monotonic() + _AHEAD_S], dtype=torch.float64)
    dist.broadcast(moment, 0)
    start = float(moment)
    time.sleep(max(0.0, start - time.monotonic()))
    return start


def _check(
    whole: torch.Tensor, expected: torch.Tensor, total: torch.Tensor, order: tuple[int, ...]
) -> None:
    by_rank = whole.view(len(order), -1)[torch.tensor(order).argsort()]
    assert torch.equal(by_rank, expected.view(len(order), -1)), "gathered other numbers"
    assert torch.equal(total, torch.full_like(total, float(len(order)))), "summed other numbers"
