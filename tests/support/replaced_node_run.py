"""A growing run of three replicas, in one of which a bit flips; another node takes the place of
that replica's: one on this machine, or what Ray's autoscaler brings. As a program of its own.

    python tests/support/replaced_node_run.py ADDRESS STORAGE GATE local|ray
"""

from __future__ import annotations

import sys

import ray

from elastic import HealthConfig, LocalNodes, RayNodes, ScalingConfig, parse_faults
from tests.support.growing_run import growing_trainer, write_left_behind

EVERY = 5

if __name__ == "__main__":
    address, storage, gate, kind = sys.argv[1:]
    nodes = RayNodes() if kind == "ray" else LocalNodes(cpus=1)
    ray.init(address=address, log_to_driver=False)
    growing_trainer(
        storage,
        gate,
        ScalingConfig(max_replicas=3),
        shard=1,
        health=HealthConfig(compare_every=EVERY, replace_nodes=nodes),
        # Between the reduction of a step and the comparison after it: no gradient has it.
        faults=parse_faults(f"flip@{2 * EVERY - 1}.optimizer:1"),
    ).fit()
    write_left_behind(storage)
