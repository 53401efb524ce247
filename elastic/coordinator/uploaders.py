"""The run's uploaders, as the coordinator knows them: one for each node, when it is first asked
for."""

from __future__ import annotations

import asyncio
import logging

from elastic.coordinator.own_handle import own_handle
from elastic.node.uploader import MOST_CALLS, Uploader
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.cluster import start_actor

log = logging.getLogger(__name__)

FINISH_S = 300.0
"""How long to wait for what is being written from a machine that is left: it may hang there."""


class Uploaders:
    """One uploader a node, started when first asked for.

    Args:
        paths: where checkpoints and snapshots go.
        segment_bytes: bound on the tensor bytes in one file.
    """

    def __init__(self, paths: RunPaths, segment_bytes: int) -> None:
        self._paths, self._segment_bytes = paths, segment_bytes
        self._handles: dict[str, Remote[Uploader]] = {}

    def of(self, node: str) -> Remote[Uploader]:
        """The uploader of `node`. Ray starts it anew where its process dies, and ends it with the
        coordinator."""
        if node not in self._handles:
            self._handles[node] = start_actor(
                Uploader, node=node, max_concurrency=MOST_CALLS, restarts=True
            )(own_handle(), self._paths, node, self._segment_bytes)
        return self._handles[node]

    async def finish(self, node: str) -> None:
        """Waits until what is being written from `node` is written, `FINISH_S` at most."""
        if node not in self._handles:
            return
        try:
            await asyncio.wait_for(self._handles[node].send(Uploader.finish), FINISH_S)
        except Exception as error:  # such as that of a node that is gone
            log.warning("what is being saved from node %s is not waited for: %s", node, error)
