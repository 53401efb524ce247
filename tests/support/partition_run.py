"""A run on several hosts, slow until a file appears, and then the same one undisturbed, as a
program of its own: a test cuts the hosts' links meanwhile. STORAGE/left.json lists what the first
one left behind.

    python tests/support/partition_run.py ADDRESS STORAGE GATE REPLICAS SHARD
"""

from __future__ import annotations

import os
import sys

import ray

from checkpointing import CheckpointConfig
from elastic import HealthConfig, ScalingConfig
from tests.support.growing_run import growing_trainer, write_left_behind
from tests.support.hosts import OWN_IP

NODE_TIMEOUT_S = 3.0


def join_cluster() -> tuple[str, str, int, int]:
    """Joins the cluster that this program was told of. Returns storage, gate, replicas, shard."""
    address, storage, gate, replicas, shard = sys.argv[1:6]
    ray.init(address=address, log_to_driver=False, _node_ip_address=os.environ[OWN_IP])
    return storage, gate, int(replicas), int(shard)


if __name__ == "__main__":
    storage, gate, replicas, shard = join_cluster()
    growing_trainer(
        storage,
        gate,
        ScalingConfig(max_replicas=replicas),
        shard,
        checkpoint=CheckpointConfig(every_steps=10, keep_every=10),
        health=HealthConfig(node_timeout_s=NODE_TIMEOUT_S),
    ).fit()
    write_left_behind(storage)
    growing_trainer(storage, gate, ScalingConfig(max_replicas=1), shard, name="whole").fit()
