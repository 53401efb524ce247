"""Where process groups meet: the control plane's store, and this process's connections to it.

Making a connection looks up names, which can take seconds where a name service does not answer. So
connections are made ahead, by a thread, and a regroup only takes one.

A call to the store waits in native code for its answer, without a bound where none comes. So each
is made on a thread of its own (`aside.py`), which is left to itself where the caller will not wait
any more. It ends when the kernel finds the connection dead (`silence.py`), when the store's process
ends, or when this process does.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from trainer.backend.aside import make_aside, threads_aside
from trainer.backend.polling import poll_until
from trainer.backend.silence import cut_connections, limit_silence_towards
from trainer.errors import GroupError

_AHEAD = 3
"""A regroup takes one connection for the groups across replicas and perhaps one for a heal."""

_TRY_S = 5.0
"""Bound on one attempt to connect; longer than a name service that answers takes."""

_PAUSE_S = 0.2
"""Between attempts."""

THREAD = "store-connection"
"""Name of the threads that connect."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where process groups meet."""

    host: str
    """Address of the control plane's TCPStore."""
    port: int
    """Its port."""
    timeout_s: float
    """Bound on rendezvous and on every collective."""
    silent_s: float = 30.0
    """A peer in the replica, or the store, whose machine acknowledges nothing for so long is given
    up."""

    def connect(self, leave_now: Callable[[], bool] = lambda: False) -> TCPStore:
        """A connection of its own to the store.

        It asks the store something, which may wait in native code: call it aside where the caller
        must hear calls.

        Raises:
            GroupError: the store's host is gone, or `leave_now` became true.
        """
        ready = _connections(self.host, self.port, self.timeout_s, self.silent_s)
        while True:
            store = ready.take(leave_now)
            with contextlib.suppress(DistNetworkError):  # it was made ahead, and is dead by now
                store.check([""])
                return store

    def store(self, prefix: str) -> Store:
        """As `connect`; sees only keys below `prefix`."""
        return PrefixStore(prefix, self.connect())

    @property
    def timeout(self) -> timedelta:
        """`timeout_s` as torch wants it."""
        return timedelta(seconds=self.timeout_s)


class _Connections:
    """Connections to one store, some of them made ahead."""

    def __init__(self, host: str, port: int, timeout_s: float, silent_s: float) -> None:
        self._host, self._port = host, port
        self._timeout_s, self._silent_s = timeout_s, silent_s
        self._ready: queue.SimpleQueue[TCPStore | GroupError] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        for _ in range(_AHEAD):
            self._make_another()

    def take(self, leave_now: Callable[[], bool]) -> TCPStore:
        """A connection for the caller alone."""
        poll_until(lambda: not self._ready.empty(), leave_now, self._timeout_s)
        self._make_another()
        connection = self._ready.get()
        if isinstance(connection, GroupError):
            raise connection
        return connection

    def close(self) -> list[threading.Thread]:
        """Makes no more connections. Returns the threads that are making some."""
        with self._starting:
            self._closed.set()
        return self._threads

    def cut(self) -> None:
        """Ends what waits for the store."""
        cut_connections(self._port)

    def _make_another(self) -> None:
        with self._starting:  # so that a thread in the list that is not alive has ended
            if self._closed.is_set():
                self._ready.put(GroupError("this process's connections are closed"))
                return
            thread = threading.Thread(target=self._make, name=THREAD, daemon=True)
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()

    def _make(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                self._ready.put(self._connect(min(_TRY_S, self._timeout_s)))
                return
            except Exception as error:
                if self._closed.wait(_PAUSE_S) or time.monotonic() > deadline_s:
                    where = f"{self._host}:{self._port}"
                    self._ready.put(GroupError(f"no connection to {where}: {error}"))
                    return

    def _connect(self, timeout_s: float) -> TCPStore:
        # Where nobody listens, TCPStore tries for more than twice its timeout.
        socket.create_connection((self._host, self._port), timeout=timeout_s).close()
        bound = timedelta(seconds=timeout_s)

        def make() -> TCPStore:
            return TCPStore(self._host, self._port, is_master=False, timeout=bound)

        store = make_aside(make, self._closed.is_set, 2 * timeout_s)
        limit_silence_towards(self._port, self._silent_s)
        store.set_timeout(timedelta(seconds=self._timeout_s))
        return store


_open: dict[tuple[str, int, float, float], _Connections] = {}
_opening = threading.Lock()


def _connections(host: str, port: int, timeout_s: float, silent_s: float) -> _Connections:
    """This process's connections to the store at an address. The store moves when the coordinator
    is started anew."""
    place = (host, port, timeout_s, silent_s)
    with _opening:
        if place not in _open:
            _open[place] = _Connections(*place)
        return _open[place]


@atexit.register
def close_connections() -> None:
    """Ends the threads that make connections ahead or wait for the store, within 3 x `_TRY_S`:
    torch, cut off while it connects, goes on trying for one.

    One that came back from native code while the interpreter is torn down would abort the process,
    which looks like a crash. Tests that have a store in their own process call it too.
    """
    with _opening:
        every = list(_open.values())
        _open.clear()
    deadline_s = time.monotonic() + 3 * _TRY_S

    def end(threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(_PAUSE_S)
            while thread.is_alive() and time.monotonic() < deadline_s:
                for connections in every:
                    connections.cut()
                thread.join(_PAUSE_S)

    end([thread for connections in every for thread in connections.close()])
    end(threads_aside())  # those that the others have left, too
