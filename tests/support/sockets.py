"""This process's connections, as the kernel knows them; ports that answer, refuse or are silent."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from health.lease import Reach


def connections_to(port: int) -> list[socket.socket]:
    """Those with `port` at the other end, each as a socket that a test may ask for its options."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(number)))
            with contextlib.suppress(OSError):
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if internet and connection.getpeername()[1] == port:
                    found.append(connection)
                    continue
            connection.close()
    return found


@contextlib.contextmanager
def port_that(reach: Reach) -> Iterator[tuple[str, int]]:
    """A port where whoever connects finds `reach`."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        contextlib.ExitStack() as held,
    ):
        address = server.getsockname()
        if reach == "refuses":
            server.close()
        if reach == "silent":  # the kernel drops what comes while the queue is full
            for _ in range(2):
                waiting = held.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(address)
        if reach == "answers":
            server.listen(100)
        yield address
