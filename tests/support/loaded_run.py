"""A growing run of two replicas, each machine of which is loaded before its first worker gets a
place. As a program of its own.

    python tests/support/loaded_run.py ADDRESS STORAGE GATE
"""

from __future__ import annotations

import sys

import ray

from elastic import HealthConfig, ScalingConfig
from tests.support.growing_run import growing_trainer, write_left_behind

if __name__ == "__main__":
    address, storage, gate = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    growing_trainer(
        storage,
        gate,
        ScalingConfig(max_replicas=2),
        shard=1,
        health=HealthConfig(preflight="full"),
    ).fit()
    write_left_behind(storage)
