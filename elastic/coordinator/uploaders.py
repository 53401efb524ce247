"""The run's uploaders, as the coordinator knows them: one for each node, when it is first asked
for."""

from __future__ import annotations

from typing import Any

import ray

from elastic.node.uploader import MOST_CALLS, Uploader
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.cluster import start_actor


class Uploaders:
    """One uploader a node, started when first asked for. All methods are immediate.

    Args:
        paths: where checkpoints and snapshots go.
        segment_bytes: bound on the tensor bytes in one file.
    """

    def __init__(self, paths: RunPaths, segment_bytes: int) -> None:
        self._paths, self._segment_bytes = paths, segment_bytes
        self._handles: dict[str, Any] = {}

    def of(self, node: str) -> Any:
        """The uploader of `node`. Ray starts it anew where its process dies, and ends it with the
        coordinator."""
        if node not in self._handles:
            self._handles[node] = start_actor(
                Uploader,
                ray.get_runtime_context().current_actor,
                self._paths,
                node,
                self._segment_bytes,
                node=node,
                max_concurrency=MOST_CALLS,
                restarts=True,
            )
        return self._handles[node]
