"""Actors in place of a coordinator, for tests of the node agent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from elastic.doctor.finding import Finding
from elastic.protocol.messages import Death
from health.verdict import Sign


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


class DyingCoordinator:
    """Its process ends with the first call of each kind, as a connection may. Later ones leave a
    file of that name.

    Args:
        folder: for these; it outlives the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def beat(self, node: str, token: str, deaths: list[Death]) -> bool:
        return True

    async def signs_changed(self, node: str, names: list[str], signs: list[Sign]) -> None:
        self._hear("signs_changed")

    async def node_checked(self, node: str, findings: list[Finding]) -> None:
        self._hear("node_checked")

    def _hear(self, what: str) -> None:
        first = self.folder / f"first {what}"
        if not first.exists():
            first.touch()
            os._exit(1)
        (self.folder / what).touch()
