"""Heartbeats as datagrams: a node's agent renews its lease with one, and hears in another whether
the lease was kept.

    beat:    "ETb3", name of the agent (16 bytes), number of the beat (8), paces, signature (32)
    pace:    process id (4), number (4) and times of the latest window (28) of a worker of the node
    answer:  "ETa2", name, number, kept: 1 or written off: 0, signature

A call to an actor costs the coordinator's process most of a millisecond, and there are thousands of
nodes. Any of the datagrams may be lost: a lease lasts for several beats, and an agent that hears
nothing calls the actor (`agent.py`).

A beat carries the paces of `MOST_PACES` workers at most, so it passes where large packets do not;
where there are more they take turns. What is lost on the way comes with the next beat.

Both sides sign (HMAC-SHA256) with the agent's token, which came with Ray's call and is never sent
here: so nobody else can renew a lease or write a node off. Numbers only grow, and each counts once:
what was sent before is worth nothing when it is sent again. What is no such datagram is passed by.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from health.pace import Pace, pace_of

_BEAT = struct.Struct("!4s16sQ")
_ANSWER = struct.Struct("!4s16sQ?")
_PACE = struct.Struct("!II7f")
_BEAT_MARK, _ANSWER_MARK = b"ETb3", b"ETa2"
_NAME_BYTES, _SIGNATURE_BYTES = 16, 32

MOST_PACES = 24
"""In a beat, which then has 924 bytes."""

Paces = Mapping[int, Pace]
"""Of the workers of a node, by their processes."""

_REMEMBERED = 16
"""Beats whose answer is still of use: more than a lease holds."""


def name_of(token: str) -> bytes:
    """What an agent is called in datagrams; tells nobody its token."""
    return hashlib.blake2b(token.encode(), digest_size=_NAME_BYTES).digest()


def _pack_paces(paces: Iterable[tuple[int, Pace]]) -> bytes:
    return b"".join(_PACE.pack(pid, *vars(pace).values()) for pid, pace in paces)


def _parse_paces(data: bytes) -> dict[int, Pace]:
    return {pid: pace_of(number, times) for pid, number, *times in _PACE.iter_unpack(data)}


def _signed(message: bytes, token: str) -> bytes:
    return message + hmac.digest(token.encode(), message, "sha256")


def _is_genuine(data: bytes, token: str) -> bool:
    return hmac.compare_digest(data, _signed(data[:-_SIGNATURE_BYTES], token))


class BeatListener(asyncio.DatagramProtocol):
    """The coordinator's end.

    Args:
        tokens: of all agents, by name; more may come.
        renew: takes the token of a beat. Returns whether the lease was kept.
        paced: takes the token of a beat whose lease was kept, and the paces in it.
    """

    def __init__(
        self,
        tokens: Mapping[bytes, str],
        renew: Callable[[str], bool],
        paced: Callable[[str, Paces], None],
    ) -> None:
        self._tokens, self._renew, self._paced = tokens, renew, paced
        self._latest: dict[bytes, int] = {}
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Called by asyncio."""
        paces = data[_BEAT.size : -_SIGNATURE_BYTES]
        if len(data) < _BEAT.size + _SIGNATURE_BYTES or len(paces) % _PACE.size:
            return
        mark, name, number = _BEAT.unpack_from(data)
        token = self._tokens.get(name)
        if mark != _BEAT_MARK or token is None or not _is_genuine(data, token):
            return
        if number <= self._latest.get(name, 0):
            return  # sent once more by somebody, or overtaken by a later one
        self._latest[name] = number
        kept = self._renew(token)
        answer = _ANSWER.pack(_ANSWER_MARK, name, number, kept)
        self._transport.sendto(_signed(answer, token), addr)
        if kept and paces:
            self._paced(token, _parse_paces(paces))


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
        self._socket = socket.socket(family, kind)
        self._token, self._name = token, name_of(token)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # no way there, and none for any beat
            self._socket.connect(where)  # the kernel drops what others send
        self._number = 0
        self._unanswered: dict[int, float] = {}

    @property
    def unanswered(self) -> int:
        """Beats since the latest one that was answered."""
        return len(self._unanswered)

    def send(self, now_s: float, paces: Paces | None = None) -> None:
        """Sends a beat at `now_s`, with what is known of the workers' paces."""
        self._number += 1
        self._unanswered[self._number] = now_s
        self._unanswered.pop(self._number - _REMEMBERED, None)
        with contextlib.suppress(OSError):  # as good as lost on the way
            beat = _BEAT.pack(_BEAT_MARK, self._name, self._number)
            told = _pack_paces(self._turn(list((paces or {}).items())))
            self._socket.send(_signed(beat + told, self._token))

    def _turn(self, paces: list[tuple[int, Pace]]) -> list[tuple[int, Pace]]:
        """Those whose turn it is."""
        turns = max(1, -(-len(paces) // MOST_PACES))
        first = self._number % turns * MOST_PACES
        return paces[first : first + MOST_PACES]

    def hear(self) -> Heard | None:
        """Takes the answers that have come, if any."""
        heard = None
        with contextlib.suppress(OSError):  # there is no more; or nobody listens there
            while True:
                heard = self._take(self._socket.recv(_ANSWER.size + _SIGNATURE_BYTES + 1)) or heard
        return heard

    def _take(self, data: bytes) -> Heard | None:
        if len(data) != _ANSWER.size + _SIGNATURE_BYTES or not _is_genuine(data, self._token):
            return None
        mark, _, number, kept = _ANSWER.unpack_from(data)
        if mark != _ANSWER_MARK or number not in self._unanswered:
            return None
        sent_s = self._unanswered[number]
        self._unanswered = {n: s for n, s in self._unanswered.items() if n > number}
        return Heard(sent_s=sent_s, kept=kept)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
