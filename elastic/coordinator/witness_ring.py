"""Whom a node's agent may ask whether they hear the coordinator.

The nodes stand in a ring by Ray's ids, which are random: so the next ones are as good as drawn, and
lie in other racks where there are others. Each agent is asked by as few as it may ask.
"""

from __future__ import annotations

import bisect

from trainer.backend.link_exchange import Address

MOST = 5
"""Witnesses of a node; a majority of them has to agree."""


class WitnessRing:
    """Where the agents of nodes answer each other. No I/O.

    Args:
        own_host: the coordinator's: who lies there goes with it, and bears no witness.
    """

    def __init__(self, own_host: str) -> None:
        self._own_host = own_host
        self._nodes: list[str] = []
        self._doors: dict[str, Address] = {}

    def meet(self, node: str, door: Address) -> list[Address]:
        """The agent of `node` answers at `door`. Returns where those answer that it may ask: on as
        many other machines, none of which is the coordinator's."""
        if node not in self._doors:
            bisect.insort(self._nodes, node)
        self._doors[node] = door
        place, found = bisect.bisect_left(self._nodes, node), list[Address]()
        taken = {self._own_host, door[0]}
        for ahead in range(1, len(self._nodes)):
            other = self._doors[self._nodes[(place + ahead) % len(self._nodes)]]
            if other[0] not in taken:
                taken.add(other[0])
                found.append(other)
            if len(found) == MOST:
                break
        return found

    def forget(self, node: str) -> None:
        """The agent of `node` has ended, or was written off."""
        if self._doors.pop(node, None) is not None:
            self._nodes.remove(node)
