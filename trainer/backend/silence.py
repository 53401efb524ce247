"""Peers whose machine is gone without a word: no power, no network.

A process that dies closes its sockets, which wakes its peers. A machine that vanishes closes
nothing: a Gloo collective waits for it until its timeout, a call to the store for ever, and neither
can be woken from outside. So the kernel is asked to watch the connections: it probes those that are
idle, and fails them when nothing was acknowledged for a while. A busy or frozen process does not
matter, because the other machine's kernel acknowledges for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

_PROBE_EVERY_S = 1
_FEW_PROBES = 3
"""In the time that a machine may be silent, where there are to be few."""
_MILLISECONDS = 1000

_INTERNET = (socket.AF_INET, socket.AF_INET6)

_TCP_ESTABLISHED = 1
"""State of a connection in the kernel's `tcp_info`."""


class Connections:
    """Some of this process's connections, by the kernel's names of their sockets."""

    def __init__(self, inodes: Iterable[str] = ()) -> None:
        self._inodes = set(inodes)

    def add(self, inode: str) -> None:
        """One more."""
        self._inodes.add(inode)

    def lost(self) -> bool:
        """Whether one of them has been closed, on either side."""
        now = _sockets()
        return any(not _established(now.get(inode)) for inode in self._inodes)

    def cut(self) -> None:
        """Shuts them down: who waits in one gets an error at once."""
        for inode, number in _sockets().items():
            if inode in self._inodes:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
                    found.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def limit_silence(silent_s: float, *, but_port: int) -> Iterator[Connections]:
    """Connections made in this block, by any thread, fail once the other machine has acknowledged
    nothing for `silent_s`; but those to `but_port`, the store's.

    Yields:
        Those connections, once the block has ended well.
    """
    before, connections = _sockets(), Connections()
    yield connections
    for inode, number in _sockets().items():
        if inode not in before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as made:
                if made.family in _INTERNET and made.getpeername()[1] != but_port:
                    watch_silence(made, silent_s, probe_every_s=_PROBE_EVERY_S)
                    connections.add(inode)


def limit_silence_towards(port: int, silent_s: float) -> None:
    """As `limit_silence`, for this process's connections to `port` that are open now. Probes are
    few, as all workers have such connections to one machine."""
    probe_every_s = max(1, int(silent_s / _FEW_PROBES))
    for number in towards(port).values():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
            watch_silence(found, silent_s, probe_every_s)


def watch_silence(connection: socket.socket, silent_s: float, probe_every_s: int) -> None:
    """Has the kernel fail a connection when nothing was acknowledged for `silent_s`, and probe one
    that is idle every `probe_every_s`. Raises OSError for a socket that is not TCP."""
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * _MILLISECONDS)
    )
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_every_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def towards(port: int) -> dict[str, int]:
    """This process's connections to `port`: the kernel's name of each -> its descriptor."""
    found = {}
    for inode, number in _sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.family in _INTERNET and one.getpeername()[1] == port:
                found[inode] = number
    return found


def _established(number: int | None) -> bool:
    if number is None:
        return False
    with socket.socket(fileno=os.dup(number)) as connection:
        state: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _TCP_ESTABLISHED


def _sockets() -> dict[str, int]:
    """The kernel's name of each open socket -> its descriptor."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found
