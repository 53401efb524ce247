"""Where a node's agent is sent to by the agents of other nodes, while the coordinator has them try
the connections between their machines."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from trainer.backend.interface import family_of, group_addresses
from trainer.backend.link_exchange import Address, exchange

_MOST_WAITING = 128
"""Connections that the kernel takes before the test begins here."""


class LinkDoor:
    """One for an agent.

    Args:
        towards: where the coordinator listens: the interface on the way there is tried, or those
            that the user has named for groups.
    """

    def __init__(self, towards: Address) -> None:
        self._towards = towards
        self._listening: socket.socket | None = None
        self._opened_s = 0.0

    def open(self) -> Address:
        """Listens from now on. Returns where. A test that was not made is forgotten."""
        self._close()
        own, *_ = group_addresses(*self._towards)
        self._listening = socket.create_server(
            (own, 0), family=family_of(own), backlog=_MOST_WAITING
        )
        self._opened_s = time.monotonic()
        host, port, *_ = self._listening.getsockname()
        return host, port

    def try_links(
        self, rank: int, peers: Mapping[int, Address], bound_s: float
    ) -> dict[int, int] | None:
        """Sends to all peers and hears them, who do the same at this time: see `exchange`. None
        where it does not listen, or hears of it so late that the others have stopped."""
        listening, self._listening = self._listening, None
        if listening is None:
            return None
        with listening:
            if time.monotonic() - self._opened_s > bound_s:
                return None
            return exchange(listening, rank, peers, bool, bound_s)

    def _close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
