"""A connection that does not carry what was sent: a proxy that alters it, or cuts it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.deaf_proxy import DeafProxy

Bend = Callable[[int, bytearray], None]
"""Gets some bytes of one direction of one connection, and how many came before them; alters them
in place, or raises ConnectionError to cut the connection there."""


class BentProxy(DeafProxy):
    """Forwards between its own port and another one on the loopback interface what `bend` leaves.

    Args:
        port: where to forward to.
        bend: see `Bend`.
    """

    def __init__(self, port: int, bend: Bend) -> None:
        super().__init__(port)
        self._bend = bend

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = 0
        try:
            while data := bytearray(await reader.read(1 << 16)):
                self._bend(at, data)
                writer.write(data)
                at += len(data)
            writer.close()
        except ConnectionError:
            writer.transport.abort()
