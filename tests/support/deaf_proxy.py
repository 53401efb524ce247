"""A connection that dies without a word: a proxy that stops forwarding, and closes nothing.

Its kernel goes on to acknowledge what is sent, as that of a process does which is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from types import TracebackType


class DeafProxy:
    """Forwards between its own port and another one on the loopback interface, until it is deaf.

    Args:
        port: where to forward to.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._hears = threading.Event()
        self._hears.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        """Where it listens."""
        self.swallowed = 0
        """Pieces of data that came while it was deaf."""
        self._loop = asyncio.new_event_loop()
        self._writers: list[asyncio.StreamWriter] = []
        self._thread = threading.Thread(target=self._run, name="deaf-proxy", daemon=True)

    def __enter__(self) -> DeafProxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def deafen(self) -> None:
        """From now on nothing is forwarded; new connections are taken and not answered."""
        self._hears.clear()

    def hear(self) -> None:
        """Forwards again. What came meanwhile is lost, and who waits for an answer waits on."""
        self._hears.set()

    def drop(self) -> None:
        """Closes all connections; it goes on to take new ones."""
        self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        while self._writers:
            self._writers.pop().transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, sock=self._listening)
        )
        self._loop.run_forever()
        server.close()
        self._close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, on = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, on]
        await asyncio.gather(self._forward(reader, on), self._forward(there, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if self._hears.is_set():
                    writer.write(data)
                else:
                    self.swallowed += 1
        if self._hears.is_set():
            writer.close()
