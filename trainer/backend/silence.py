"""Peers whose machine is gone without a word: no power, no network.

A process that dies closes its sockets, which wakes its peers. A machine that vanishes closes
nothing: a Gloo collective waits for it until its timeout, and cannot be woken from outside. So the
kernel is asked to watch the group's connections: it probes those that are idle, and fails them
when nothing was acknowledged for a while. A busy or frozen process does not matter, because the
other machine's kernel acknowledges for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_PROBE_EVERY_S = 1
_MILLISECONDS = 1000


@contextlib.contextmanager
def limit_silence(silent_s: float) -> Iterator[None]:
    """Connections made in this block, by any thread, fail once the other machine has acknowledged
    nothing for `silent_s`."""
    before = _sockets()
    yield
    for inode, number in _sockets().items():
        if inode not in before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as made:
                _watch(made, silent_s)


def _sockets() -> dict[str, int]:
    """The kernel's name of each open socket -> its descriptor."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found


def _watch(connection: socket.socket, silent_s: float) -> None:
    """Raises OSError for a socket that is not TCP."""
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * _MILLISECONDS)
    )
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
