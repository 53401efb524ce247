"""Which connections to the other workers of a group do not carry what a collective sends.

A link may pass small packets and drop large ones, or all of one direction. Groups are made over it,
and each of their collectives fails with nobody dead, while Gloo and NCCL do not say at which peer.
So all members listen, connect to all others, and send each a small message and then a large one.
Who has not got all of a peer's in time names that peer. This is no part of any step.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial

from torch._C._distributed_c10d import PrefixStore

from trainer.backend.aside import make_aside
from trainer.backend.groups import gather
from trainer.backend.interface import group_addresses
from trainer.backend.rendezvous import Rendezvous
from trainer.errors import GroupError

LINK_BYTES = 256 * 1024
"""What crosses a connection, each way: many packets of full size."""

BOUND_S = 10.0
"""A good connection takes milliseconds, and may lose its first packet three times in a row."""

_SMALL = struct.Struct("!I60x")
"""The first message, in a packet of its own: who sends."""

_POLL_S = 0.01
_Address = tuple[str, int]


def try_links(
    rendezvous: Rendezvous,
    prefix: str,
    *,
    rank: int,
    size: int,
    leave_now: Callable[[], bool],
    bound_s: float = BOUND_S,
) -> dict[int, int]:
    """Tries this worker's connections to the others of a group. All `size` of them call it at once.

    Args:
        rendezvous: where they meet.
        prefix: new for each test.
        rank: this worker's.
        size: workers in the group.
        leave_now: ends the test.
        bound_s: how long a peer's message may take.

    Returns:
        Rank of each peer whose `LINK_BYTES` have not come -> bytes that have; 0: no connection, or
        nothing came over it.

    Raises:
        GroupError: `leave_now` became true, or a peer or the store's answer did not come.
    """
    if size == 1:
        return {}
    own, *_ = group_addresses(rendezvous.host, rendezvous.port)
    with socket.create_server((own, 0), backlog=size) as listening:
        peers = _meet(rendezvous, prefix, rank, size, listening, leave_now)
        arrived = asyncio.run(_exchange(listening, rank, peers, leave_now, bound_s))
    return {peer: count for peer, count in arrived.items() if count < LINK_BYTES}


def _meet(
    rendezvous: Rendezvous,
    prefix: str,
    rank: int,
    size: int,
    listening: socket.socket,
    leave_now: Callable[[], bool],
) -> dict[int, _Address]:
    """Waits until all listen. Returns where each peer does."""
    host, port, *_ = listening.getsockname()
    names = [str(peer) for peer in range(size)]

    with rendezvous.connection(leave_now) as store:
        tell = partial(PrefixStore(prefix, store).set, names[rank], f"{host} {port}")
        make_aside(tell, leave_now, rendezvous.timeout_s)
    with gather(rendezvous, prefix, size, leave_now) as store:
        ask = partial(PrefixStore(prefix, store).multi_get, names)
        told = make_aside(ask, leave_now, rendezvous.timeout_s)
    found = [value.decode().split() for value in told]
    return {peer: (h, int(p)) for peer, (h, p) in enumerate(found) if peer != rank}


async def _exchange(
    listening: socket.socket,
    rank: int,
    peers: Mapping[int, _Address],
    leave_now: Callable[[], bool],
    bound_s: float,
) -> dict[int, int]:
    """Sends to all peers and hears them. Returns how many bytes have come of each."""
    arrived = dict.fromkeys(peers, 0)

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            (peer,) = _SMALL.unpack(await reader.readexactly(_SMALL.size))
            if peer in arrived:
                arrived[peer] += _SMALL.size
                while part := await reader.read(LINK_BYTES):
                    arrived[peer] += len(part)
        writer.close()

    async def send(address: _Address) -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*address)
            try:
                writer.write(_SMALL.pack(rank))
                await writer.drain()
                writer.write(bytes(LINK_BYTES - _SMALL.size))
                writer.close()
                await writer.wait_closed()
            finally:
                writer.transport.abort()

    server = await asyncio.start_server(hear, sock=listening, backlog=len(peers))
    sending = [asyncio.create_task(send(address)) for address in peers.values()]
    deadline = time.monotonic() + bound_s
    while not (
        all(task.done() for task in sending)
        and all(count >= LINK_BYTES for count in arrived.values())
    ):
        if leave_now():
            raise GroupError("left the test of the connections for a regroup")
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_POLL_S)
    server.close()
    return arrived
