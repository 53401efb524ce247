"""Heartbeats as datagrams: a node's agent renews its lease with one, and hears in another whether
the lease was kept.

    beat:    "ETb1", number of the beat (8 bytes), key (32 bytes)        agent ──► coordinator
    answer:  "ETa1", number of the beat, key, kept: 1 or written off: 0  coordinator ──► agent

A call to an actor costs the coordinator's process most of a millisecond, and there are thousands of
nodes. Any of the datagrams may be lost: a lease lasts for several beats, and an agent that hears
nothing calls the actor (`node_agent.py`). The key is the digest of the agent's secret token, so
nobody else can renew a lease or write a node off; what is not such a datagram is passed by.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BEAT = struct.Struct("!4sQ32s")
_ANSWER = struct.Struct("!4sQ32s?")
_BEAT_MARK, _ANSWER_MARK = b"ETb1", b"ETa1"

_BUFFER_BYTES = 1 << 20
"""Room for the beats that come while the event loop is busy; the kernel may grant less."""

_REMEMBERED = 16
"""Beats whose answer is still of use: more than a lease holds."""


def key_of(token: str) -> bytes:
    """What an agent's datagrams carry for its token."""
    return hashlib.blake2b(token.encode(), digest_size=32).digest()


def open_socket(host: str) -> socket.socket:
    """The socket that a coordinator hears beats on: on `host` alone, or, where that is not an
    address of this machine, on all of its interfaces."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0][0]
    listening = socket.socket(family, socket.SOCK_DGRAM)
    listening.setblocking(False)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    try:
        listening.bind((host, 0))
    except OSError:
        listening.bind(("", 0))
    return listening


class BeatListener(asyncio.DatagramProtocol):
    """The coordinator's end.

    Args:
        renew: takes the key of a beat. Returns whether the lease was kept, None for a key that it
            does not know.
    """

    def __init__(self, renew: Callable[[bytes], bool | None]) -> None:
        self._renew = renew
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Called by asyncio."""
        if len(data) != _BEAT.size:
            return
        mark, number, key = _BEAT.unpack(data)
        if mark != _BEAT_MARK:
            return
        kept = self._renew(key)
        if kept is not None:
            self._transport.sendto(_ANSWER.pack(_ANSWER_MARK, number, key, kept), addr)


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What the answers to beats have said."""

    sent_s: float
    """When the latest beat that was answered had been sent."""
    kept: bool
    """Whether the lease was kept."""


class BeatSender:
    """An agent's end. No method waits.

    Args:
        address: host and port of the coordinator's socket.
        token: the agent's.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        family, kind, *_, where = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        self._socket, self._key = socket.socket(family, kind), key_of(token)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # no way there, and none for any beat
            self._socket.connect(where)  # the kernel drops what others send
        self._number = 0
        self._unanswered: dict[int, float] = {}

    @property
    def unanswered(self) -> int:
        """Beats since the latest one that was answered."""
        return len(self._unanswered)

    def send(self, now_s: float) -> None:
        """Sends a beat at `now_s`."""
        self._number += 1
        self._unanswered[self._number] = now_s
        self._unanswered.pop(self._number - _REMEMBERED, None)
        with contextlib.suppress(OSError):  # as good as lost on the way
            self._socket.send(_BEAT.pack(_BEAT_MARK, self._number, self._key))

    def hear(self) -> Heard | None:
        """Takes the answers that have come, if any."""
        heard = None
        with contextlib.suppress(OSError):  # there is no more; or nobody listens there
            while True:
                heard = self._take(self._socket.recv(_ANSWER.size + 1)) or heard
        return heard

    def _take(self, data: bytes) -> Heard | None:
        if len(data) != _ANSWER.size:
            return None
        mark, number, key, kept = _ANSWER.unpack(data)
        if (mark, key) != (_ANSWER_MARK, self._key) or number not in self._unanswered:
            return None
        sent_s = self._unanswered[number]
        self._unanswered = {n: s for n, s in self._unanswered.items() if n > number}
        return Heard(sent_s=sent_s, kept=kept)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
