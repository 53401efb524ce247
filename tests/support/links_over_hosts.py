"""One of several workers, each on a host of its own, that try their connections; rank 0 hosts the
store.

    python tests/support/links_over_hosts.py RANK SIZE STORE_HOST BOUND_S
"""

from __future__ import annotations

import sys
import time

from torch._C._distributed_c10d import TCPStore

from trainer.backend.link_test import try_links
from trainer.backend.rendezvous import Rendezvous

PORT = 7001
LONG_S = 1000.0

if __name__ == "__main__":
    rank, size, host, bound_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    if rank == 0:
        store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host=host, port=PORT, timeout_s=60)
    found = try_links(meet, "links", rank=rank, size=size, leave_now=bool, bound_s=bound_s)
    print(f"found {found}", flush=True)
    time.sleep(LONG_S)  # rank 0 has the store
