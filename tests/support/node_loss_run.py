"""A gated run on three nodes of one machine, one of which is lost with its memory at half, as a
program of its own: the cluster of the other tests has one node.

    python tests/support/node_loss_run.py STORAGE

The one replica has a shard on each of two nodes. Prints the report's metrics as JSON.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from checkpointing import Keys
from elastic.protocol.events import ReplicaForming, WorkerJoined
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from tests.support.gated_run import HALF, gated_trainer, in_memory
from tests.support.tiny import numbers_of

DEADLINE_S = 120.0


def lose_a_node(cluster: Cluster, paths: RunPaths, gate: Path) -> None:
    """Once the snapshot of HALF lies on two nodes: one of them goes, and what it held."""
    deadline = time.monotonic() + DEADLINE_S
    while len(list(paths.memory.glob(f"*/{Keys().commit(HALF)}"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    head = ray.get_runtime_context().get_node_id()
    segments = list(paths.memory.glob(f"*/d/*/r*/{HALF:012}-*/*"))
    holding = {path.relative_to(paths.memory).parts[0] for path in segments}
    happened = read_events(paths.events)
    (forming,) = [e for e in happened if isinstance(e, ReplicaForming)]
    joined = [e for e in happened if isinstance(e, WorkerJoined)]
    # Not the node of the spare, which may hold a copy.
    working = {e.node: e.pid for e in joined if e.worker in forming.workers}
    (lost, *_) = sorted((holding & working.keys()) - {head})
    (node,) = [node for node in cluster.worker_nodes if node.node_id == lost]
    worker = os.pidfd_open(working[lost])
    cluster.remove_node(node, allow_graceful=False)
    assert select.select([worker], [], [], DEADLINE_S)[0], "it would train on through the gate"
    shutil.rmtree(paths.memory / lost)
    gate.touch()


def main(storage: Path) -> None:
    """The run."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    gate, paths = storage / "gate", RunPaths(root=storage / "gated")
    thief = threading.Thread(target=lose_a_node, args=(cluster, paths, gate), daemon=True)
    thief.start()
    trainer = gated_trainer(
        str(storage), str(gate), 1, checkpoint=in_memory(HALF), shard=2, spares=1
    )
    metrics = numbers_of(trainer.fit())
    thief.join()
    print(json.dumps({name: metrics[name] for name in ("outcome", "lost_steps")}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
