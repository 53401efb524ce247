"""This process's connections, as the kernel knows them."""

from __future__ import annotations

import contextlib
import os
import socket


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
