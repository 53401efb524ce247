"""Where process groups meet: the control plane's store, and this process's connections to it.

Making a connection looks up names, which can take seconds where a name service does not answer. So
connections are made ahead, by a thread, and a regroup only takes one.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trainer.backend.polling import poll_until

_AHEAD = 3
"""A regroup takes one connection for the groups across replicas and perhaps one for a heal."""


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
    """A peer in the replica whose machine acknowledges nothing for so long is given up."""

    def store(self, prefix: str, leave_now: Callable[[], bool] = lambda: False) -> Store:
        """A connection of its own to the store, that sees only keys below `prefix`.

        Raises:
            RuntimeError: the store's host is gone, or `leave_now` became true.
        """
        ready = _connections(self.host, self.port, self.timeout_s)
        return PrefixStore(prefix, ready.take(leave_now, self.timeout_s))

    def shared_store(self, prefix: str, leave_now: Callable[[], bool] = lambda: False) -> Store:
        """As `store`, over a connection that all callers share: for calls that do not wait."""
        ready = _connections(self.host, self.port, self.timeout_s)
        return PrefixStore(prefix, ready.shared(leave_now, self.timeout_s))

    @property
    def timeout(self) -> timedelta:
        """`timeout_s` as torch wants it."""
        return timedelta(seconds=self.timeout_s)


class _Connections:
    """Connections to one store, some of them made ahead."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._host, self._port, self._timeout = host, port, timedelta(seconds=timeout_s)
        self._ready: queue.SimpleQueue[TCPStore | RuntimeError] = queue.SimpleQueue()
        self._shared: TCPStore | None = None
        self._sharing = threading.Lock()
        for _ in range(_AHEAD):
            self._make_another()

    def take(self, leave_now: Callable[[], bool], timeout_s: float) -> TCPStore:
        """A connection for the caller alone."""
        poll_until(lambda: not self._ready.empty(), leave_now, timeout_s)
        self._make_another()
        connection = self._ready.get()
        if isinstance(connection, RuntimeError):
            raise connection
        return connection

    def shared(self, leave_now: Callable[[], bool], timeout_s: float) -> TCPStore:
        """The connection for calls that do not wait."""
        with self._sharing:
            if self._shared is None:
                self._shared = self.take(leave_now, timeout_s)
            return self._shared

    def _make_another(self) -> None:
        threading.Thread(target=self._make, name="store-connection", daemon=True).start()

    def _make(self) -> None:
        try:
            store = TCPStore(self._host, self._port, is_master=False, timeout=self._timeout)
            self._ready.put(store)
        except Exception as error:
            self._ready.put(RuntimeError(f"no connection to {self._host}:{self._port}: {error}"))


@functools.lru_cache(maxsize=2)
def _connections(host: str, port: int, timeout_s: float) -> _Connections:
    """This process's connections to the store at an address. The store moves when the coordinator
    is started anew."""
    return _Connections(host, port, timeout_s)
