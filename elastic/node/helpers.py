"""The run's helpers on a node: the uploader and the snapshot holder, beside workers and agent.

One that ends is started anew by whoever needs it, and a call to it fails at once. One that is
frozen answers nothing, for ever; so the node's agent watches it as it watches workers, and kills it
(`process_watch.py`).
"""

from __future__ import annotations

import os

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.messages import Helper
from elastic.protocol.rpc import Remote
from health.process import read_born_ticks


def announce(coordinator: Remote[CoordinatorApi], node: str, name: str) -> None:
    """Has this process watched by the agent of its node. Each helper calls it once, as it starts.

    Args:
        coordinator: the run's.
        node: Ray's id of this node.
        name: what it is, in words.
    """
    pid = os.getpid()
    helper = Helper(name=name, pid=pid, born_ticks=read_born_ticks(pid))
    coordinator.call(CoordinatorApi.helper_started, node, helper)
