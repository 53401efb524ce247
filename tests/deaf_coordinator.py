"""An actor in place of a coordinator, for tests of the node agent."""

from __future__ import annotations

import asyncio

from elastic.messages import Death


class DeafCoordinator:
    """Answers no beat until it is told to listen, and keeps what it was told then."""

    def __init__(self) -> None:
        self.told: list[Death] = []
        self.listening = asyncio.Event()

    async def beat(self, node: str, token: str, deaths: list[Death]) -> bool:
        await self.listening.wait()
        self.told += deaths
        return True

    async def listen(self) -> None:
        self.listening.set()

    async def all_told(self) -> list[Death]:
        return self.told
