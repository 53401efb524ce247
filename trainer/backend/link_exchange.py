"""What comes of a large message that each of several sends to all others, over connections of their
own: a link may pass small packets and drop large ones, or all of one direction.

Whoever makes the test says how they meet: the workers of a group by their store
(`link_test.py`), the agents of nodes by the coordinator. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable, Mapping

from trainer.errors import GroupError

LINK_BYTES = 256 * 1024
"""What crosses a connection, each way: many packets of full size."""

_SMALL = struct.Struct("!I60x")
"""The first message, in a packet of its own: who sends."""

_POLL_S = 0.01
Address = tuple[str, int]
"""Host and port."""


def exchange(
    listening: socket.socket,
    rank: int,
    peers: Mapping[int, Address],
    leave_now: Callable[[], bool],
    bound_s: float,
) -> dict[int, int]:
    """Sends to all peers and hears them.

    Args:
        listening: where the peers send to; it is closed at the end.
        rank: what they know this one by.
        peers: rank of each -> where it listens.
        leave_now: ends the test.
        bound_s: how long a peer's message may take.

    Returns:
        Rank of each peer whose `LINK_BYTES` have not come -> bytes that have; 0: no connection, or
        nothing came over it.

    Raises:
        GroupError: `leave_now` became true.
    """
    arrived = asyncio.run(_exchange(listening, rank, peers, leave_now, bound_s))
    return {peer: count for peer, count in arrived.items() if count < LINK_BYTES}


async def _exchange(
    listening: socket.socket,
    rank: int,
    peers: Mapping[int, Address],
    leave_now: Callable[[], bool],
    bound_s: float,
) -> dict[int, int]:
    """Returns how many bytes have come of each peer."""
    arrived = dict.fromkeys(peers, 0)

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lost = contextlib.suppress(OSError, asyncio.IncompleteReadError)
        with contextlib.closing(writer.transport), lost:
            (peer,) = _SMALL.unpack(await reader.readexactly(_SMALL.size))
            if peer in arrived:
                arrived[peer] += _SMALL.size
                while part := await reader.read(LINK_BYTES):
                    arrived[peer] += len(part)

    async def send(address: Address) -> None:
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
