"""Where process groups meet: the control plane's store, and this process's connections to it.

A worker has two, as all workers' end in one process. Who meets has one for itself, as a call waits
in native code for its answer; then it goes back for the next. Two meet at once in a worker at most:
its part across the replicas, and a heal or what it builds beside the steps.

A wait that is left ends when its connection is shut down; that one is replaced. Making one looks up
names, which can take seconds where a name service does not answer. So that is done ahead, by a
thread, and a regroup only takes one. The kernel ends what waits for a machine that is gone
(`silence.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import TCPStore

from trainer.backend import aside
from trainer.backend.aside import make_aside, threads_aside
from trainer.backend.polling import poll_until
from trainer.backend.silence import Connections, limit_silence_towards, towards
from trainer.errors import GroupError

CONNECTIONS = 2
"""Of a process to a store. Decision: docs/decisions/035."""

_TRY_S = 5.0
"""Bound on one attempt to connect; longer than a name service that answers takes."""

_NAMES_S = 60.0
"""Bound on what `look_up_names` waits for beside a name server, which has bounds of its own."""

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

    @contextlib.contextmanager
    def connection(self, leave_now: Callable[[], bool] = lambda: False) -> Iterator[TCPStore]:
        """A connection to the store, for the caller alone until the block ends. Whatever holds it
        longer shares it with those that come next.

        An exception in the block shuts it down, which ends what may still wait in it.

        Raises:
            GroupError: the store's host is gone, or `leave_now` became true.
        """
        ready = _connections(self.host, self.port, self.timeout_s, self.silent_s)
        store, wire = ready.take(leave_now)
        try:
            yield store
        except BaseException:
            ready.replace(wire)
            raise
        ready.give_back(store, wire)

    @property
    def timeout(self) -> timedelta:
        """`timeout_s` as torch wants it."""
        return timedelta(seconds=self.timeout_s)


class _Made(NamedTuple):
    """A connection that was made."""

    store: TCPStore
    wire: Connections
    """Its socket."""


class _Connections:
    """The connections to one store."""

    def __init__(self, host: str, port: int, timeout_s: float, silent_s: float) -> None:
        self._host, self._port = host, port
        self._timeout_s, self._silent_s = timeout_s, silent_s
        self._ready: queue.SimpleQueue[_Made | GroupError] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._making = threading.Lock()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        for _ in range(CONNECTIONS):
            self._make_another()

    def take(self, leave_now: Callable[[], bool]) -> _Made:
        """One that nobody else uses. The caller gives it back or has it replaced."""
        while True:
            poll_until(lambda: not self._ready.empty(), leave_now, self._timeout_s)
            with contextlib.suppress(queue.Empty):  # another thread was faster
                found = self._ready.get_nowait()
                if isinstance(found, GroupError):
                    self._make_another()
                    raise found
                if not found.wire.lost():
                    return found
                self.replace(found.wire)  # it has died since

    def give_back(self, store: TCPStore, wire: Connections) -> None:
        """It is free."""
        self._ready.put(_Made(store, wire))

    def replace(self, wire: Connections) -> None:
        """Shuts one down and makes another."""
        wire.cut()
        self._make_another()

    def close(self) -> list[threading.Thread]:
        """Makes no more connections. Returns the threads that are making some."""
        with self._starting:
            self._closed.set()
        return self._threads

    def cut(self) -> None:
        """Ends what waits for the store."""
        Connections(towards(self._port)).cut()

    def _make_another(self) -> None:
        with self._starting:  # so that a thread in the list that is not alive has ended
            if self._closed.is_set():
                self._ready.put(GroupError("this process's connections are closed"))
                return
            thread = threading.Thread(target=self._make, name=THREAD, daemon=True)
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()

    def _make(self) -> None:
        _look_up_names()
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

    def _connect(self, timeout_s: float) -> _Made:
        bound = timedelta(seconds=timeout_s)

        def make() -> TCPStore:
            return TCPStore(self._host, self._port, is_master=False, timeout=bound)

        with self._making:  # one at a time, so that what is new is its
            # Where nobody listens, TCPStore tries for more than twice its timeout.
            socket.create_connection((self._host, self._port), timeout=timeout_s).close()
            before = towards(self._port)
            try:
                store = make_aside(make, self._closed.is_set, 2 * timeout_s)
            except GroupError:
                Connections(towards(self._port) - before).cut()
                raise
            wire = Connections(towards(self._port) - before)
        limit_silence_towards(self._port, self._silent_s)
        store.set_timeout(timedelta(seconds=self._timeout_s))
        return _Made(store, wire)


_looking_up = threading.Lock()
_looked_up = False


def look_up_names() -> None:
    """Begins what the first connection of this process waits for; called when a worker starts.

    c10d asks for the name of each address that it makes a socket for, until it gets no answer: then
    it has waited for 6 s or longer, which counts as time of the try, and asks no more. A store of
    this process's own has it ask before any try."""
    threading.Thread(target=_look_up_names, name=aside.THREAD, daemon=True).start()


def _look_up_names() -> None:
    """Returns when it is done, whoever does it."""
    global _looked_up
    with _looking_up:
        if not _looked_up:
            with contextlib.suppress(Exception):  # a try will tell
                bound = timedelta(seconds=_NAMES_S)
                TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=bound)
            _looked_up = True


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
