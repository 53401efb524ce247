"""The gated run with its checkpoints on S3, in replicas of SHARD workers (2): a program with a
cluster of its own, whose workers get their credentials from its environment.

    python tests/support/s3_run.py URL ENDPOINT STORAGE GATE REPLICAS [SHARD]
"""

from __future__ import annotations

import sys

import ray

from checkpointing import CheckpointConfig, S3Config
from tests.support.gated_run import HALF, gated_trainer

if __name__ == "__main__":
    url, endpoint, storage, gate, replicas, *shard = sys.argv[1:]
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    checkpoint = CheckpointConfig(
        every_steps=HALF, store=S3Config(url=url, endpoint_url=endpoint, encryption="AES256")
    )
    degree = int(shard[0]) if shard else 2
    gated_trainer(storage, gate, int(replicas), checkpoint=checkpoint, shard=degree).fit()
