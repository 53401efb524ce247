"""One of two workers that make a replica, each on a host of its own; rank 0 hosts the store.

    python tests/support/replica_over_hosts.py RANK STORE_HOST SILENT_S SLEEP_S

After a first collective rank 1 sleeps, while rank 0 waits for it in a second one.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from trainer.backend.groups import make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.parallel.layout import ParallelDims

PORT = 7001

if __name__ == "__main__":
    rank, host = int(sys.argv[1]), sys.argv[2]
    silent_s, sleep_s = map(float, sys.argv[3:])
    if rank == 0:
        store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host=host, port=PORT, timeout_s=900, silent_s=silent_s)
    make_replica_group(meet, "one", rank=rank, dims=ParallelDims(shard=2), device="cpu")
    ones = torch.ones(4)
    dist.all_reduce(ones)
    assert ones.tolist() == [2, 2, 2, 2]
    print("waiting", flush=True)
    if rank == 1:
        time.sleep(sleep_s)
    try:
        dist.all_reduce(ones)
    except RuntimeError as error:
        print(f"given up: {error}", flush=True)
    else:
        print("done", flush=True)
