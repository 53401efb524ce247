"""Who watches, on each node, for notices that the node will be taken away.

Built in is the EC2 spot notice. Others are found as entry points of the group
`elastictrainer.providers`, each a `Watcher`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Protocol

from elastic.providers.ec2_spot import watch_spot
from elastic.providers.tell import Tell

log = logging.getLogger(__name__)

PLUGINS = "elastictrainer.providers"


class Watch(Protocol):
    """Runs by itself, on a thread of its own."""

    def close(self) -> None:
        """Ends the watch."""


Watcher = Callable[[str, Tell], Watch | None]
"""Starts to watch for notices about this node, given by Ray's id, and tells of each once; None
where this machine gets none."""


def start_watches(node: str, tell: Tell) -> list[Watch]:
    """Starts all that apply to this machine. Called once in each node's agent.

    One that cannot be started is logged and left out: the node is watched all the same.
    """
    watches = []
    for name, load in _watchers():
        try:
            watch = load()(node, tell)
        except Exception:
            log.exception("the watch %r for notices about node %s does not start", name, node)
            continue
        if watch is not None:
            watches.append(watch)
    return watches


def _watchers() -> Iterator[tuple[str, Callable[[], Watcher]]]:
    yield "ec2_spot", lambda: watch_spot
    for plugin in entry_points(group=PLUGINS):
        yield plugin.name, plugin.load
