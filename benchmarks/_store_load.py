"""What a regroup asks of the coordinator's store: one real connection for each worker that speaks.

Torch's own client would need a thread for each worker, here, where they all live in one process. So
this one speaks torch's protocol on plain sockets, from a process of its own; the benchmark reads
what it has left in the store with torch's client.

A worker's calls on NCCL: `gather` of `trainer/backend/groups.py` (add, wait), then those of c10d
(`ProcessGroupNCCL::allgatherUniqueNCCLIDs`), which gets the communicator's ids, one for each 128
members. TCPStore waits for keys before it gets them, so that is four messages, each answered.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

_SET, _ADD, _WAIT, _MULTI_GET = 1, 4, 6, 10
_HELLO = bytes([0]) + struct.pack("<I", 0x3C85F7CE) + bytes([13]) + struct.pack("<I", 0)
"""Validates the protocol, then pings; the answer is the ping's number."""
_PONG_BYTES, _COUNT_BYTES, _WAITED_BYTES = 4, 8, 1
RANKS_PER_ID, ID_BYTES = 128, 128
_PORTS_PER_ADDRESS = 2_000
"""Far below what there are: those of the last size are closed, but not free yet."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What all workers do at once."""

    generation: int
    """Of the new roster."""
    workers: range
    """Who takes part; a worker's place modulo `groups` is its group."""
    groups: int
    """Across replicas, one for each position in a replica."""

    def prefix(self, group: int) -> str:
        """Of a group's keys."""
        return f"cross/{self.generation}/{group}/all"

    @property
    def members(self) -> int:
        """Of a group."""
        return len(self.workers) // self.groups

    @property
    def ids(self) -> int:
        """Of a group's communicator."""
        return -(-self.members // RANKS_PER_ID)


class StoreLoad:
    """The workers' connections, in a process of their own.

    Args:
        port: of the store, on this machine.
        workers: who speaks.
        idle: further connections, which are held and say nothing.
    """

    def __init__(self, port: int, workers: int, idle: int) -> None:
        self.workers = workers
        self.met: list[Meeting] = []
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, port, workers, idle))
        self._process.start()
        self._calls.recv()

    def meet(self, meeting: Meeting) -> float:
        """Seconds until all have met."""
        self._calls.send(meeting)
        seconds: float = self._calls.recv()
        self.met.append(meeting)
        return seconds

    def close(self) -> None:
        """Closes the connections."""
        self._calls.send(None)
        self._process.join()


@contextlib.contextmanager
def store_load(port: int, workers: int, idle: int) -> Iterator[StoreLoad]:
    """For a block."""
    load = StoreLoad(port, workers, idle)
    try:
        yield load
    finally:
        load.close()


def _serve(calls: Connection, port: int, workers: int, idle: int) -> None:
    speaking = [_connect(port, number) for number in range(workers)]
    silent = [_connect(port, workers + number) for number in range(idle)]
    calls.send(len(speaking) + len(silent))
    while (meeting := calls.recv()) is not None:
        calls.send(_meet(meeting, speaking))


def _connect(port: int, number: int) -> socket.socket:
    own = f"127.0.0.{2 + number // _PORTS_PER_ADDRESS}"
    connection = socket.create_connection(("127.0.0.1", port), source_address=(own, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_HELLO)
    assert len(connection.recv(_PONG_BYTES, socket.MSG_WAITALL)) == _PONG_BYTES
    return connection


def _meet(meeting: Meeting, speaking: list[socket.socket]) -> float:
    scripts = [_Script(meeting, group) for group in range(meeting.groups)]
    with select.epoll() as polled:
        waiting = {}
        for number in meeting.workers:
            connection = speaking[number]
            polled.register(connection, select.EPOLLIN)
            place, group = divmod(number - meeting.workers.start, meeting.groups)
            waiting[connection.fileno()] = _worker(connection, scripts[group], place)
        began_s = time.perf_counter()
        for steps in waiting.values():
            next(steps)
        while waiting:
            for number, _ in polled.poll():
                if next(waiting[number], None) is None:
                    del waiting[number]
        return time.perf_counter() - began_s


def _worker(connection: socket.socket, script: _Script, place: int) -> Iterator[bool]:
    """One worker's calls; goes on when an answer is there."""
    connection.sendall(script.add)
    yield True
    count = connection.recv(_COUNT_BYTES, socket.MSG_WAITALL)
    if int.from_bytes(count, "little") == script.members:
        connection.sendall(script.set_all)
    else:
        connection.sendall(script.wait_for_all)
        yield True
        connection.recv(_WAITED_BYTES)
    if place % RANKS_PER_ID == 0:
        connection.sendall(script.set_id[place // RANKS_PER_ID])
    connection.sendall(script.wait_for_ids)
    yield True
    connection.recv(_WAITED_BYTES)
    connection.sendall(script.get_ids)
    yield True
    assert len(connection.recv(script.ids_bytes, socket.MSG_WAITALL)) == script.ids_bytes


class _Script:
    """The messages of one group's members."""

    def __init__(self, meeting: Meeting, group: int) -> None:
        prefix = f"/{meeting.prefix(group)}"  # TCPStore begins every key so
        keys = [f"{prefix}/UniqueNCCLID:{number}" for number in range(meeting.ids)]
        many = struct.pack("<Q", len(keys)) + b"".join(_text(key.encode()) for key in keys)
        everybody = _text(f"{prefix}/here/all".encode())
        self.members = meeting.members
        self.add = bytes([_ADD]) + _text(f"{prefix}/here/count".encode()) + struct.pack("<q", 1)
        self.set_all = bytes([_SET]) + everybody + _text(b"")
        self.wait_for_all = bytes([_WAIT]) + struct.pack("<Q", 1) + everybody
        self.set_id = [bytes([_SET]) + _text(key.encode()) + _text(bytes(ID_BYTES)) for key in keys]
        self.wait_for_ids = bytes([_WAIT]) + many
        self.get_ids = bytes([_MULTI_GET]) + many
        self.ids_bytes = len(keys) * len(_text(bytes(ID_BYTES)))


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value
