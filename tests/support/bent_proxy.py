"""A connection that does not carry what was sent: a proxy that alters it, or cuts it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.deaf_proxy import DeafProxy

Bend = Callable[[int, bytearray], None]
"""Gets some of the bytes that the target sends over one connection, and how many came before them;
alters them in place, or raises ConnectionError to cut the connection there."""


class BentProxy(DeafProxy):
    """Forwards to another port on the loopback interface, and from there what `bend` leaves.

    Args:
        port: where to forward to.
        bend: see `Bend`.
    """

    def __init__(self, port: int, bend: Bend) -> None:
        super().__init__(port)
        self._bend = bend

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, on = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, on]
        await asyncio.gather(self._forward(reader, on), self._forward_bent(there, writer))

    async def _forward_bent(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        at = 0
        try:
            while data := bytearray(await reader.read(1 << 16)):
                self._bend(at, data)
                writer.write(data)
                at += len(data)
            writer.close()
        except ConnectionError:
            writer.transport.abort()
