"""The driver's eye on the coordinator, which lives on the driver's node.

A coordinator that ends is started anew by Ray, and no step stops. One that is frozen by a signal
answers nobody, and nothing fails a call to it: the next worker that is lost would be waited for
without end. So the driver kills a frozen one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from types import TracebackType

from elastic.node.process_watch import ProcessWatch
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote
from elastic.ray_compat.cluster import process_here

log = logging.getLogger(__name__)

_INTERVAL_S = 0.5


class CoordinatorWatch:
    """Watches the coordinator's process, on a thread, for as long as the `with` block lasts.

    Args:
        coordinator: the run's coordinator actor.
    """

    def __init__(self, coordinator: Remote[CoordinatorApi]) -> None:
        self._coordinator = coordinator
        self._processes = ProcessWatch(freeze_timeout_s=math.inf)
        self._watched: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            try:
                self._look()
            except Exception as error:  # Ray may be unreachable for a while
                log.warning("the coordinator's process is looked for again: %s", error)

    def _look(self) -> None:
        pid = process_here(self._coordinator)
        if pid not in (None, self._watched):
            self._processes.watch("coordinator", pid, heartbeat_fd=None)
            self._watched = pid
        self._processes.ended(timeout_s=0)
        for death in self._processes.frozen(time.monotonic()):
            log.warning("the coordinator is killed: %s", death.detail)
