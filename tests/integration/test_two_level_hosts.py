"""Two-level collectives with hosts as nodes: what goes over the network between them is each
worker's shard to its like on the other hosts, and no more."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

from tests.support.hosts import Network, enter, ip_of, requires_hosts
from trainer.backend.groups import collectives_begun, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.parallel.layout import ParallelDims
from trainer.parallel.two_level import TwoLevels

PORT, NODES, SIZE, SHARD = 7001, 3, 6, 1 << 18
"""Numbers in a shard: 1 MiB."""
BATCHES = 4 + 4
"""Two rounds, each of two steps: across, inside, or the other way round; in both collectives."""


def work(position: int, hosts: list[str], results: Any) -> None:
    node = position % NODES
    enter(hosts[node])
    torch.set_num_threads(1)
    if position == 0:  # kept until the end
        store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
        assert store
    meet = Rendezvous(host=ip_of(0), port=PORT, timeout_s=120)
    dims = ParallelDims(shard=SIZE, nodes=NODES)
    make_replica_group(meet, "one", rank=position, dims=dims, device="cpu")
    group, levels = dist.distributed_c10d._get_default_group(), TwoLevels(nodes=NODES)
    before = collectives_begun()
    whole = torch.zeros(SIZE, SHARD)
    whole[position] = position
    levels.all_gather(whole.view(-1), group)
    total = torch.empty(SHARD)
    addends = torch.arange(1.0, SIZE + 1)[:, None].expand(SIZE, SHARD) * (position + 1)
    levels.reduce_scatter(total, addends.reshape(-1), group)
    results[position] = (
        whole[:, ::1000].tolist(),
        total[::1000].tolist(),
        collectives_begun() - before >= BATCHES,
    )
    dist.barrier()


multiprocessing.set_forkserver_preload(["trainer.backend.groups", "trainer.parallel.two_level"])


def sent_bytes(namespace: str) -> int:
    shown = subprocess.run(
        ["ip", "-n", namespace, "-s", "-j", "link", "show", "uplink"],
        capture_output=True,
        check=True,
    )
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


@requires_hosts
def test_each_host_sends_its_own_shards_only() -> None:
    with Network(NODES) as network, mp.Manager() as manager:
        results = manager.dict()
        arguments = (network.hosts, results)
        mp.start_processes(work, args=arguments, nprocs=SIZE, start_method="forkserver")
        sent = [sent_bytes(name) for name in network.hosts]
        found = dict(results)
    factors = SIZE * (SIZE + 1) / 2
    for position, (gathered, total, counted) in found.items():
        assert gathered == [[float(rank)] * len(gathered[0]) for rank in range(SIZE)]
        assert total == [factors * (position + 1)] * len(total)
        assert counted, "heartbeats would see a worker stand still"
    # Two workers with a shard for two other hosts, in each of the collectives. In a group whose
    # neighbours in rank are on one host it would be twice as much.
    expected = 2 * 2 * (2 * SHARD * 4)
    assert all(expected <= each < 1.15 * expected for each in sent), (sent, expected)
