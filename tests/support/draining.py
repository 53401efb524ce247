"""What autoscalers say to Ray when a machine will be taken away."""

from __future__ import annotations

import time
from typing import Any

from ray import _raylet
from ray.core.generated import autoscaler_pb2


def announce_drain(address: str, node: str) -> None:
    """Announces to the cluster at `address` that `node` will be taken away in ten minutes."""
    raylet: Any = _raylet
    messages: Any = autoscaler_pb2
    reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 600) * 1000)
    gcs = raylet.GcsClient(address=address)
    accepted, why_not = gcs.drain_node(node, reason, "a test", deadline_ms)
    assert accepted, why_not
