"""One of two hosts: the first has the store, the second waits in it for a peer that never comes.

python tests/support/store_over_hosts.py RANK STORE_HOST SILENT_S
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from trainer.backend.groups import gather
from trainer.backend.rendezvous import Rendezvous
from trainer.errors import GroupError

PORT = 7001

if __name__ == "__main__":
    rank, host, silent_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if rank == 0:
        store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
        print("listens", flush=True)
        store.wait(["one/here/count"], timedelta(hours=1))
        print("waited in", flush=True)
        threading.Event().wait()
    meet = Rendezvous(host=host, port=PORT, timeout_s=900, silent_s=silent_s)
    try:
        with gather(meet, "one", 2, bool):
            pass
    except GroupError as error:
        print(f"given up: {error}", flush=True)
