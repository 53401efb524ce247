"""An actor in place of a coordinator, for tests of the node agent."""

from __future__ import annotations

import asyncio

from elastic.protocol.messages import Death


class DeafCoordinator:
    """Answers no call until it is told to listen, and keeps what it was told then. It hears no
    datagrams."""

    def __init__(self) -> None:
        self.told: list[Death] = []
        self.calls = 0
        self.listening = asyncio.Event()

    async def beat(self, node: str, token: str, deaths: list[Death]) -> bool:
        self.calls += 1
        await self.listening.wait()
        self.told += deaths
        return True

    async def listen(self) -> None:
        self.listening.set()

    async def called(self) -> int:
        return self.calls

    async def all_told(self) -> list[Death]:
        return self.told
