"""Machines of a cluster on this one."""

from __future__ import annotations

from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.support.draining import announce_drain


class Machines:
    """Machines that a run has, beside one for its driver that has no room for workers."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": 200 << 20,
            },
        )
        ray.init(address=self.cluster.address, log_to_driver=False)
        self._nodes: list[tuple[int, Any]] = []

    def have(self, cpus: tuple[int, ...]) -> None:
        """Sees to it that there are these machines and no others."""
        if [size for size, _ in self._nodes] != list(cpus):
            while self._nodes:
                self.remove()
            for size in cpus:
                self.add(size)

    def add(self, cpus: int) -> str:
        """One more. Returns Ray's id of it."""
        node = self.cluster.add_node(num_cpus=cpus, object_store_memory=100 << 20)
        self._nodes.append((cpus, node))
        return str(node.node_id)

    def remove(self, at: int = -1) -> str:
        """The newest, or another one, is gone without a word. Returns its id."""
        _, node = self._nodes.pop(at)
        self.cluster.remove_node(node, allow_graceful=False)
        return str(node.node_id)

    def drain(self) -> str:
        """Ray is told that the newest will go, as autoscalers do. Returns its id."""
        node_id = str(self._nodes[-1][1].node_id)
        announce_drain(self.cluster.address, node_id)
        return node_id

    def close(self) -> None:
        """All go."""
        ray.shutdown()
        self.cluster.shutdown()
