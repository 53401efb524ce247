"""The run's uploaders, as the coordinator knows them: one for each node, when it is first asked
for."""

from __future__ import annotations

import asyncio
import logging

from elastic.coordinator.own_handle import own_handle
from elastic.node.uploader import MOST_CALLS, Uploader
from elastic.protocol import events
from elastic.protocol.messages import Identity
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
        self._saving: dict[str, str] = {}
        """Workers whose part of a checkpoint is being written -> their nodes: as they say where
        they let go of their places, or find another coordinator."""
        self._ended = asyncio.Event()

    def of(self, node: str) -> Remote[Uploader]:
        """The uploader of `node`. Ray starts it anew where its process dies, and ends it with the
        coordinator."""
        if node not in self._handles:
            self._handles[node] = start_actor(
                Uploader, node=node, max_concurrency=MOST_CALLS, restarts=True
            )(own_handle(), self._paths, node, self._segment_bytes)
        return self._handles[node]

    def hear_saving(self, identity: Identity, saving: bool) -> None:
        """A worker says whether its part of a checkpoint is being written."""
        if saving:
            self._saving[identity.worker] = identity.node
        else:
            self.end_saving(identity.worker)

    def end_saving(self, worker: str) -> None:
        """That is over."""
        if self._saving.pop(worker, None) is not None:
            self._ended.set()

    def hear(self, event: events.Event) -> None:
        """Something was written down: what a lost worker wrote itself ends with it."""
        if isinstance(event, events.WorkerLost):
            self.end_saving(event.worker)

    async def finish(self, node: str) -> None:
        """Waits until what is being written from `node` is written, `FINISH_S` at most. Workers may
        do that themselves: uploaders end with a coordinator that is lost, and Ray starts none on a
        machine that it drains."""
        try:
            await asyncio.wait_for(self._finish(node), FINISH_S)
        except asyncio.TimeoutError:
            log.warning("what is being saved from node %s is not there in %g s", node, FINISH_S)

    async def _finish(self, node: str) -> None:
        if node in self._handles:
            try:
                await self._handles[node].send(Uploader.finish)
            except Exception as error:  # such as that of a node that is gone
                log.warning("the uploader of node %s is not waited for: %s", node, error)
        while node in self._saving.values():
            self._ended.clear()
            await self._ended.wait()
