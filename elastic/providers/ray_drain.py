"""Ray's drain API: autoscalers, KubeRay and `ray drain-node` announce by it that a machine goes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from elastic.providers.tell import Tell

log = logging.getLogger(__name__)


class DrainWatch:
    """Asks Ray once a second which nodes it drains, and tells of each once.

    Args:
        look: node -> deadline, ms since the epoch, 0: none given (`ray_compat.draining_nodes`).
        tell: called from the watch's thread, once per node.
        interval_s: between two looks.
    """

    def __init__(
        self, look: Callable[[], Mapping[str, int]], tell: Tell, *, interval_s: float = 1.0
    ) -> None:
        self._look, self._tell, self._interval_s = look, tell, interval_s
        self._known: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drain-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            try:
                self._take(self._look())
            except Exception as error:  # Ray may be unreachable for a while
                log.warning("draining nodes are looked for again: %s", error)

    def _take(self, draining: Mapping[str, int]) -> None:
        for node, deadline_ms in draining.items():
            if node not in self._known:
                self._tell(node, deadline_ms / 1000 if deadline_ms else None, "Ray drains the node")
                self._known.add(node)
