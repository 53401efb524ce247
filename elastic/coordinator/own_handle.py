"""The coordinator's handle of itself, for the actors that it starts."""

from __future__ import annotations

import ray

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote


def own_handle() -> Remote[CoordinatorApi]:
    """Called within the coordinator's process."""
    return Remote(ray.get_runtime_context().current_actor)
