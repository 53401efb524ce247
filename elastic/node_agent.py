"""One actor per node that sees its workers' processes end, at once and without polling.

The kernel makes a pidfd readable when its process ends, so a death reaches the coordinator within
milliseconds, long before a socket timeout or Ray's own health check.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

import ray

from elastic.drain import SpotWatch, on_ec2, tell_coordinator


class NodeAgent:
    """Watches the workers of its node. The coordinator makes one per node and calls it.

    Args:
        coordinator: handle of the coordinator actor, told of every process that ends.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._watched: dict[int, tuple[str, int]] = {}
        self._poll = select.epoll()
        threading.Thread(target=self._run, name="pidfd-watch", daemon=True).start()
        if on_ec2():
            node = ray.get_runtime_context().get_node_id()
            self._spot = SpotWatch(node, tell_coordinator(coordinator))

    def watch(self, worker: str, pid: int) -> None:
        """Reports when process `pid`, which is `worker`, ends; at once where it already has."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._coordinator.worker_died.remote(
                worker, "its process was gone when the watch began"
            )
            return
        self._watched[fd] = (worker, pid)
        self._poll.register(fd, select.EPOLLIN)

    def kill(self, worker: str) -> None:
        """Ends the process of `worker`, if it is one of this node's and still runs."""
        for fd, (name, _) in list(self._watched.items()):
            if name == worker:
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def wait(self) -> None:
        """Never returns: a pending call to it fails when this agent's node is lost."""
        threading.Event().wait()

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                self._poll.unregister(fd)
                worker, pid = self._watched.pop(fd)
                os.close(fd)
                self._coordinator.worker_died.remote(worker, f"process {pid} ended")
