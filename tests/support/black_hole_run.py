"""As `partition_run.py`, with a model whose gradient takes packets of full size, and a spare where
there is a host for one.

python tests/support/black_hole_run.py ADDRESS STORAGE GATE REPLICAS SHARD [PROGRESS_TIMEOUT_S]
"""

from __future__ import annotations

import sys
from dataclasses import replace

from torch import nn

from elastic import HealthConfig, ScalingConfig
from tests.support.growing_run import growing_trainer, write_left_behind
from tests.support.partition_run import NODE_TIMEOUT_S, join_cluster

HIDDEN = 4096


def build_wide_model() -> nn.Module:
    """48 KiB of gradient."""
    return nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


if __name__ == "__main__":
    storage, gate, replicas, shard = join_cluster()
    health = HealthConfig(node_timeout_s=NODE_TIMEOUT_S)
    if sys.argv[6:]:
        health = replace(health, progress_timeout_s=float(sys.argv[6]))
    growing_trainer(
        storage,
        gate,
        ScalingConfig(max_replicas=replicas, spares=1),
        shard,
        health=health,
        model=build_wide_model,
    ).fit()
    write_left_behind(storage)
    alone = ScalingConfig(max_replicas=1)
    growing_trainer(storage, gate, alone, shard, name="whole", model=build_wide_model).fit()
