"""Heartbeats as datagrams: a node's agent renews its lease with one, and hears in another whether
the lease was kept.

    beat:    "ETb4", name of the agent (16 bytes), number of the beat (8), its port for others'
             questions (2), paces, signature (32)
    pace:    process id (4), number (4) and times of the latest window (28) of a worker of the node
    answer:  "ETa3", name, number, kept: 1 or written off: 0, witnesses, signature
    witness: IPv6 address (16; an IPv4 one is mapped) and port (2) of another agent (`witnesses.py`)

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
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from health.pace import Pace, pace_of
from trainer.backend.link_exchange import Address

_BEAT = struct.Struct("!4s16sQH")
_ANSWER = struct.Struct("!4s16sQ?")
_PACE = struct.Struct("!II7f")
_WITNESS = struct.Struct("!16sH")
_BEAT_MARK, _ANSWER_MARK = b"ETb4", b"ETa3"
_NAME_BYTES = 16
SIGNATURE_BYTES = 32
_MOST_ANSWER_BYTES = 1000

MOST_PACES = 24
"""In a beat, which then has 926 bytes."""

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


def _pack_witness(witness: Address) -> bytes:
    host, port = witness
    address = ipaddress.ip_address(host)
    if address.version == 4:
        address = ipaddress.IPv6Address(f"::ffff:{host}")
    return _WITNESS.pack(address.packed, port)


def _parse_witnesses(data: bytes) -> tuple[Address, ...]:
    found = [(ipaddress.IPv6Address(host), port) for host, port in _WITNESS.iter_unpack(data)]
    return tuple((str(host.ipv4_mapped or host), port) for host, port in found)


def signed(message: bytes, secret: str) -> bytes:
    """A message and its signature."""
    return message + hmac.digest(secret.encode(), message, "sha256")


def is_genuine(data: bytes, secret: str) -> bool:
    """Whether `data` is a message that was signed with `secret`."""
    return hmac.compare_digest(data, signed(data[:-SIGNATURE_BYTES], secret))


class BeatListener(asyncio.DatagramProtocol):
    """The coordinator's end.

    Args:
        tokens: of all agents, by name; more may come.
        renew: takes the token of a beat. Returns whether the lease was kept.
        paced: takes the token of a beat whose lease was kept, and the paces in it.
        meet: takes the token of such a beat, and where its agent answers others. Returns where
            those answer that it may ask.
    """

    def __init__(
        self,
        tokens: Mapping[bytes, str],
        renew: Callable[[str], bool],
        paced: Callable[[str, Paces], None],
        meet: Callable[[str, Address], Sequence[Address]] = lambda token, door: (),
    ) -> None:
        self._tokens, self._renew, self._paced, self._meet = tokens, renew, paced, meet
        self._latest: dict[bytes, int] = {}
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Called by asyncio."""
        paces = data[_BEAT.size : -SIGNATURE_BYTES]
        if len(data) < _BEAT.size + SIGNATURE_BYTES or len(paces) % _PACE.size:
            return
        mark, name, number, port = _BEAT.unpack_from(data)
        token = self._tokens.get(name)
        if mark != _BEAT_MARK or token is None or not is_genuine(data, token):
            return
        if number <= self._latest.get(name, 0):
            return  # sent once more by somebody, or overtaken by a later one
        self._latest[name] = number
        kept = self._renew(token)
        witnesses = self._meet(token, (addr[0], port)) if kept else ()
        answer = _ANSWER.pack(_ANSWER_MARK, name, number, kept)
        answer += b"".join(map(_pack_witness, witnesses))
        self._transport.sendto(signed(answer, token), addr)
        if kept and paces:
            self._paced(token, _parse_paces(paces))


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What the answers to beats have said."""

    sent_s: float
    """When the latest beat that was answered had been sent."""
    kept: bool
    """Whether the lease was kept."""
    witnesses: tuple[Address, ...] = ()
    """Where other agents answer this one."""
    ago_s: float = field(default=0.0, compare=False)
    """How long ago that beat was sent, on the monotonic clock."""


class BeatSender:
    """An agent's end. No method waits.

    Args:
        address: host and port of the coordinator's socket.
        token: the agent's.
        port: where it answers other agents.
    """

    def __init__(self, address: tuple[str, int], token: str, port: int = 0) -> None:
        family, kind, *_, where = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        self._socket = socket.socket(family, kind)
        self._token, self._name, self._port = token, name_of(token), port
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # no way there, and none for any beat
            self._socket.connect(where)  # the kernel drops what others send
        self._number = 0
        self._unanswered: dict[int, tuple[float, float]] = {}

    @property
    def unanswered(self) -> int:
        """Beats since the latest one that was answered."""
        return len(self._unanswered)

    def send(self, now_s: float, paces: Paces | None = None) -> None:
        """Sends a beat at `now_s`, with what is known of the workers' paces."""
        self._number += 1
        self._unanswered[self._number] = now_s, time.monotonic()
        self._unanswered.pop(self._number - _REMEMBERED, None)
        with contextlib.suppress(OSError):  # as good as lost on the way
            beat = _BEAT.pack(_BEAT_MARK, self._name, self._number, self._port)
            told = _pack_paces(self._turn(list((paces or {}).items())))
            self._socket.send(signed(beat + told, self._token))

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
                heard = self._take(self._socket.recv(_MOST_ANSWER_BYTES)) or heard
        return heard

    def _take(self, data: bytes) -> Heard | None:
        witnesses = data[_ANSWER.size : -SIGNATURE_BYTES]
        if len(data) < _ANSWER.size + SIGNATURE_BYTES or not is_genuine(data, self._token):
            return None
        mark, _, number, kept = _ANSWER.unpack_from(data)
        if mark != _ANSWER_MARK or number not in self._unanswered:
            return None
        sent_s, sent_at = self._unanswered[number]
        self._unanswered = {n: s for n, s in self._unanswered.items() if n > number}
        return Heard(
            sent_s=sent_s,
            kept=kept,
            witnesses=_parse_witnesses(witnesses),
            ago_s=time.monotonic() - sent_at,
        )

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
