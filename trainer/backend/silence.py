"""Peers whose machine is gone without a word: no power, no network.

A process that dies closes its sockets, which wakes its peers. A machine that vanishes closes
nothing: a Gloo collective waits for it until its timeout, a call to the store for ever. Who knows
better shuts the connections down, which wakes whoever waits in them. Where nobody does, the kernel
is asked to watch them: it probes those that are idle, and fails them when nothing was acknowledged
for a while. There a busy or frozen process does not matter: the other machine's kernel acknowledges
for it. To who sends more than that kernel has room for it does: `TCP_USER_TIMEOUT` bounds the wait
for room as well. Gloo sends to who takes it, on threads of its own; a heal may not (`watch_idle`).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator

_PROBE_EVERY_S = 1
_FEW_PROBES = 3
"""In the time that a machine may be silent, where there are to be few."""
_MOST_PROBES = 127
"""That the kernel lets a connection have."""
_MILLISECONDS = 1000

_INTERNET = (socket.AF_INET, socket.AF_INET6)

_TCP_ESTABLISHED = 1
"""State of a connection in the kernel's `tcp_info`."""


class Connections:
    """Some of this process's connections, by the kernel's numbers of their sockets."""

    def __init__(self, inodes: Iterable[int] = ()) -> None:
        self._inodes = set(inodes)
        self.left = False
        """Whether their group was left: a call that came before says nothing of the next one."""

    def add(self, inode: int) -> None:
        """One more."""
        self._inodes.add(inode)

    def lost(self) -> bool:
        """Whether one of them has been closed, on either side."""
        with _sockets() as now:
            return any(not _established(now.get(inode)) for inode in self._inodes)

    def cut(self) -> None:
        """Shuts them down: who waits in one gets an error at once."""
        with _sockets() as now:
            for inode in self._inodes & now.keys():
                with contextlib.suppress(OSError):  # the other side was faster
                    now[inode].shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def limit_silence(silent_s: float, *, but_port: int) -> Iterator[Connections]:
    """Connections made in this block, by any thread, fail once the other machine has acknowledged
    nothing for `silent_s`; but those to `but_port`, the store's.

    Yields:
        Those connections, once the block has ended well.
    """
    with _sockets() as now:
        before = set(now)
    connections = Connections()
    yield connections
    with _sockets() as now:
        for inode, made in now.items():
            if inode not in before and _peer_port(made) not in (None, but_port):
                watch_silence(made, silent_s, probe_every_s=_PROBE_EVERY_S)
                connections.add(inode)


def limit_silence_towards(port: int, silent_s: float) -> None:
    """As `limit_silence`, for this process's connections to `port` that are open now. Probes are
    few, as all workers have such connections to one machine."""
    probe_every_s = max(1, int(silent_s / _FEW_PROBES))
    with _sockets() as now:
        for found in now.values():
            if _peer_port(found) == port:
                watch_silence(found, silent_s, probe_every_s)


def watch_silence(connection: socket.socket, silent_s: float, probe_every_s: int) -> None:
    """Has the kernel fail a connection when nothing was acknowledged, or the other side has taken
    nothing of what is to be sent, for `silent_s`, and probe one that is idle every `probe_every_s`.
    Raises OSError for a socket that is not TCP."""
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * _MILLISECONDS)
    )
    _probe(connection, probe_every_s)


def watch_idle(connection: socket.socket, silent_s: float) -> None:
    """Has the kernel fail an idle connection when no probe was acknowledged for `silent_s`. Who
    sends may wait for room at the other side, and for a machine that is gone, as long as the
    socket's own timeout says."""
    probe_every_s = max(_PROBE_EVERY_S, math.ceil(silent_s / _MOST_PROBES))
    _probe(connection, probe_every_s)
    probes = max(1, int(silent_s / probe_every_s))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def _probe(connection: socket.socket, every_s: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def towards(port: int) -> set[int]:
    """This process's connections to `port`, by the kernel's numbers of their sockets."""
    with _sockets() as now:
        return {inode for inode, found in now.items() if _peer_port(found) == port}


def _peer_port(connection: socket.socket) -> int | None:
    """Port of the other side; None for what is not a connection over IP."""
    if connection.family not in _INTERNET or connection.type != socket.SOCK_STREAM:
        return None
    try:
        port: int = connection.getpeername()[1]
    except OSError:  # it listens, or was closed
        return None
    return port


def _established(connection: socket.socket | None) -> bool:
    if connection is None:
        return False
    state: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _TCP_ESTABLISHED


_copying = threading.Lock()


@contextlib.contextmanager
def _sockets() -> Iterator[dict[int, socket.socket]]:
    """This process's open sockets, by the kernel's number of each. They are copies, which stay what
    they are whatever other threads close meanwhile, and end with the block.

    One thread at a time: else the copies of another would be listed, in place of what they copy.
    """
    with _copying, contextlib.ExitStack() as copies:
        found = {}
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed since it was listed
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    copy = copies.enter_context(socket.socket(fileno=os.dup(number)))
                    found[os.fstat(copy.fileno()).st_ino] = copy
        yield found
