"""Another job on a node, which takes one of its CPUs until its standard input ends.

python tests/support/taken_cpu.py ADDRESS NODE
"""

from __future__ import annotations

import sys
from typing import Any

import ray

from elastic.ray_compat.cluster import on_node

if __name__ == "__main__":
    address, node = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    holder: Any = ray.remote(num_cpus=1)(type("Holder", (), {}))
    actor = holder.options(scheduling_strategy=on_node(node)).remote()
    ray.get(actor.__ray_ready__.remote())
    print("taken", flush=True)
    sys.stdin.read()
