"""The gated run in replicas of two workers, with its checkpoints on S3: a program with a cluster of
its own, whose workers get their credentials from its environment.

    python tests/s3_run.py URL ENDPOINT STORAGE GATE REPLICAS
"""

from __future__ import annotations

import sys

import ray
from gated_run import HALF, gated_trainer

from checkpointing import CheckpointConfig, S3Config

if __name__ == "__main__":
    url, endpoint, storage, gate, replicas = sys.argv[1:]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    checkpoint = CheckpointConfig(
        every_steps=HALF, store=S3Config(url=url, endpoint_url=endpoint, encryption="AES256")
    )
    gated_trainer(storage, gate, int(replicas), checkpoint=checkpoint, shard=2).fit()
