"""What a heal is sent over: TCP connections between one source and each of its newcomers.

    source                                        newcomer
    listens, tells the store where                asks the store
                                  <── connects ── several times: each connection is a stream
    challenge                     ──────────────►
                                  ◄────────────── which newcomer and stream, challenge, proof
    what comes, proof             ──────────────►
    position, length, CRC-32, bytes ────────────►  ... block by block

A proof is an HMAC-SHA256 with the run's secret over both challenges, what is said, and the place of
the meeting; the secret itself is never sent. So neither side takes a stranger, or somebody of
another run or generation, for the other. Each block carries its position, its length and a CRC-32
that begins at its position: one that is altered, or comes in another's place, is found before it is
placed. The sizes of all that comes are known before it comes: no memory is taken on a peer's word.
Decision: docs/decisions/040.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from torch._C._distributed_c10d import PrefixStore

from checkpointing.format.crc32 import crc32
from trainer.backend.aside import make_aside
from trainer.backend.polling import LEFT
from trainer.backend.rendezvous import Rendezvous
from trainer.backend.silence import watch_idle
from trainer.errors import GroupError, HealError

STREAMS = 4
"""Connections of a newcomer to its source. EC2 gives one flow 5 Gbit/s, or 10 within a placement
group, of the 100 and more that its large machines have."""

_HELLO_S = 30.0
"""Bound on both proofs together: a stranger is waited for no longer, however slowly it speaks."""

_LEAST_S = 1e-3
"""Of a timeout: with 0 a socket would not wait at all."""

_CHALLENGE_BYTES = 32
_HELLO = struct.Struct("!II32s")
_WELCOME = struct.Struct("!QQQ")
_PROOF_BYTES = 32
_BLOCK = struct.Struct("!QII")

_T = TypeVar("_T")

Place = tuple[str, int]
"""Address and port that a source listens on."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One source and its newcomers."""

    rendezvous: Rendezvous
    """Where the newcomers learn of the source's address; its bounds."""
    prefix: str
    """Unique to the generation, the (shard, tensor) and the source."""
    secret: bytes = field(repr=False)
    """The run's."""
    newcomers: int = 1
    """How many the source sends to."""
    streams: int = STREAMS
    """Connections of each."""
    bytes_per_s: float | None = None
    """Most that the source sends, to all of them together; None: what the network carries."""

    def tell(self, places: Sequence[Place], leave_now: Callable[[], bool]) -> None:
        """The source says where it listens; no place: it cannot. Raises GroupError where the store
        does not answer, or `leave_now` became true."""
        said = "\n".join(f"{host} {port}" for host, port in places)
        self._through_store(lambda store: store.set("places", said), leave_now)

    def ask(self, leave_now: Callable[[], bool]) -> list[Place]:
        """Waits until the source has said where it listens. Raises GroupError where it does not in
        time, or `leave_now` became true; HealError where it cannot listen."""
        told = self._through_store(lambda store: store.get("places"), leave_now)
        rows = [line.split() for line in told.decode().splitlines()]
        if not rows:
            raise HealError("the source cannot listen for connections; its log says why")
        return [(host, int(port)) for host, port in rows]

    def _through_store(
        self, call: Callable[[PrefixStore], _T], leave_now: Callable[[], bool]
    ) -> _T:
        with self.rendezvous.connection(leave_now) as store:
            asking = partial(call, PrefixStore(self.prefix, store))
            return make_aside(asking, leave_now, self.rendezvous.timeout_s)


class Sockets:
    """The sockets of one side of a heal. `stop`, which any thread may call, ends what waits in
    one."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._open: set[socket.socket] = set()
        self._stopped = threading.Event()

    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def sleep(self, seconds: float) -> None:
        """Waits for so long. Raises GroupError once `stop` is called."""
        if self._stopped.wait(seconds):
            raise GroupError(LEFT)

    @contextlib.contextmanager
    def holding(self, made: socket.socket) -> Iterator[socket.socket]:
        """Closes `made` after the block. Raises GroupError after `stop`."""
        with made:
            with self._changing:
                if self._stopped.is_set():
                    raise GroupError(LEFT)
                self._open.add(made)
            try:
                yield made
            finally:
                with self._changing:
                    self._open.remove(made)

    def stop(self) -> None:
        """Shuts all of them down."""
        with self._changing:
            self._stopped.set()
            for one in self._open:
                with contextlib.suppress(OSError):  # the peer was faster
                    one.shutdown(socket.SHUT_RDWR)


class Pace:
    """Holds back those who send more than `bytes_per_s` together."""

    def __init__(self, bytes_per_s: float | None, sockets: Sockets) -> None:
        self._bytes_per_s, self._sockets = bytes_per_s, sockets
        self._next = threading.Lock()
        self._free_at_s = 0.0

    def wait(self, count: int) -> None:
        """Waits until so many bytes may be sent. Raises GroupError once they are to be left."""
        if self._bytes_per_s is None:
            return
        with self._next:
            now_s = time.monotonic()
            begin_s = max(self._free_at_s, now_s)
            self._free_at_s = begin_s + count / self._bytes_per_s
        self._sockets.sleep(begin_s - now_s)


class Stream(NamedTuple):
    """Which connection it is."""

    newcomer: int
    """Number of the newcomer among those of its source."""
    number: int
    """Of the stream, among those of the newcomer."""


class Facts(NamedTuple):
    """What a source says of the state that it sends."""

    state_bytes: int
    """Its size."""
    optimizer_steps: int
    """Of the state."""
    skipped_in_a_row: int
    """Of the state's progress."""


def welcome(connection: socket.socket, meeting: Meeting, facts: Facts) -> Stream:
    """The source's part of the proofs. Returns which stream the connection is.

    Raises:
        HealError: the other side is not of this meeting.
        OSError: the connection failed.
    """
    own, until_s = secrets.token_bytes(_CHALLENGE_BYTES), time.monotonic() + _HELLO_S
    connection.settimeout(_HELLO_S)
    connection.sendall(own)
    hello = _receive(connection, _HELLO.size, until_s)
    proof = _receive(connection, _PROOF_BYTES, until_s)
    if not hmac.compare_digest(proof, _proof(meeting, b"newcomer", own, hello)):
        raise HealError("somebody connected whose proof is wrong: it has not this run's secret")
    said = _WELCOME.pack(*facts)
    connection.sendall(said + _proof(meeting, b"source", own, hello, said))
    _watch(connection, meeting)
    newcomer, number, _ = _HELLO.unpack(hello)
    return Stream(newcomer, number)


def enter(connection: socket.socket, meeting: Meeting, stream: Stream) -> Facts:
    """The newcomer's part. Returns what the source says of the state.

    Raises:
        HealError: the other side is not this meeting's source, or has closed the connection.
        OSError: the connection failed.
    """
    until_s = time.monotonic() + _HELLO_S
    challenge = _receive(connection, _CHALLENGE_BYTES, until_s)
    hello = _HELLO.pack(*stream, secrets.token_bytes(_CHALLENGE_BYTES))
    connection.sendall(hello + _proof(meeting, b"newcomer", challenge, hello))
    said = _receive(connection, _WELCOME.size, until_s)
    proof = _receive(connection, _PROOF_BYTES, until_s)
    if not hmac.compare_digest(proof, _proof(meeting, b"source", challenge, hello, said)):
        raise HealError("who listens at the source's address has not this run's secret")
    _watch(connection, meeting)
    return Facts(*_WELCOME.unpack(said))


def _proof(meeting: Meeting, role: bytes, *said: bytes) -> bytes:
    """What only a side of `meeting` in this `role` can say. The parts of a role have fixed sizes,
    so no two messages are the same bytes."""
    message = b"".join([role, *said, meeting.prefix.encode()])
    return hmac.digest(meeting.secret, message, "sha256")


def _watch(connection: socket.socket, meeting: Meeting) -> None:
    """From now on the bounds are those of the run. A newcomer that builds takes nothing meanwhile:
    its source waits for it."""
    connection.settimeout(meeting.rendezvous.timeout_s)
    watch_idle(connection, meeting.rendezvous.silent_s)


def send_block(connection: socket.socket, position: int, data: memoryview) -> None:
    """Sends a block, whose first byte is number `position` of the state. Raises OSError."""
    connection.sendall(_BLOCK.pack(position, len(data), _crc(position, data)))
    connection.sendall(data)


def receive_block(connection: socket.socket, position: int, into: memoryview) -> None:
    """Receives the block of the size of `into` that begins at byte `position`.

    Raises:
        HealError: another one came, or other bytes than were sent, or no more.
        OSError: the connection failed.
    """
    at, length, sent_crc = _BLOCK.unpack(_receive(connection, _BLOCK.size))
    if (at, length) != (position, len(into)):
        raise HealError(
            f"{length:,} bytes at {at:,} of the state came instead of {len(into):,} at {position:,}"
        )
    _receive_into(connection, into)
    crc = _crc(position, into)
    if crc != sent_crc:
        raise HealError(
            f"{length:,} bytes at {position:,} of the state have the CRC-32 {crc:08x}, their "
            f"source sent {sent_crc:08x}"
        )


def _crc(position: int, data: memoryview) -> int:
    return crc32(data, crc32(position.to_bytes(8, "big")))


def _receive(connection: socket.socket, count: int, until_s: float | None = None) -> bytes:
    data = bytearray(count)
    _receive_into(connection, memoryview(data), until_s)
    return bytes(data)


def _receive_into(
    connection: socket.socket, into: memoryview, until_s: float | None = None
) -> None:
    """Fills `into`, by `until_s` on the monotonic clock; None: the connection's timeout bounds the
    wait for each part."""
    filled = 0
    while filled < len(into):
        if until_s is not None:
            connection.settimeout(max(_LEAST_S, until_s - time.monotonic()))
        try:
            count = connection.recv_into(into[filled:])
        except TimeoutError as error:
            if until_s is not None:
                raise HealError(
                    f"the other side did not prove who it is in {_HELLO_S:g} s"
                ) from error
            raise HealError(f"nothing came for {connection.gettimeout():g} s") from error
        if count == 0:
            raise HealError("the other side has closed the connection, or is gone")
        filled += count
