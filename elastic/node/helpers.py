"""The run's helpers on a node: the uploader and the snapshot holder, beside workers and agent.

One that ends is started anew by whoever needs it, and a call to it fails at once. One that is
frozen answers nothing, for ever; so the node's agent watches it as it watches workers, and kills it
(`process_watch.py`).
"""

from __future__ import annotations

import os

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote


def announce(coordinator: Remote[CoordinatorApi], node: str, helper: str) -> None:
    """Has this process watched by the agent of its node. Each helper calls it once, as it starts.

    Args:
        coordinator: the run's.
        node: Ray's id of this node.
        helper: what it is, in words.
    """
    coordinator.call(CoordinatorApi.helper_started, node, helper, os.getpid())
