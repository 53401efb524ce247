"""What workers say of a group across replicas that has failed.

The first of a roster has all called away. What others of it say, before they are called, is written
down beside it: one alone who names a peer may be the one at fault.
"""

from __future__ import annotations

import time

from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog
from elastic.membership.machine import Membership
from elastic.protocol import events

_MOST_NODES = 8
"""Whose words are written down for a roster. Two that name the same peer are enough."""


class CrossFailures:
    """Takes in the failures of a roster.

    Args:
        membership: knows the roster, and is told of the first.
        dispatcher: carries out what follows.
        records: where they are written down.
    """

    def __init__(self, membership: Membership, dispatcher: Dispatcher, records: RunLog) -> None:
        self._membership, self._dispatcher, self._records = membership, dispatcher, records
        self._told = set[str]()
        """Nodes that have told of this roster's."""

    async def take(self, generation: int, reason: str, worker: str | None = None) -> None:
        """A collective across the replicas of a roster has failed for `worker`, or, where none is
        named, does not end. Others are heard until the next roster stands: those that hear late may
        name workers that have left it by then. So a signature that blames the peer which a reason
        names may only be one that tells of silence, not of a closed connection."""
        membership = self._membership
        first = membership.cross_lost(generation, reason)
        if first:
            self._told.clear()
        identity = membership.members.get(worker) if worker is not None else None
        node = None if identity is None else identity.node
        if first or (generation == membership.roster.generation and self._is_new(node)):
            self._records.note(
                events.CrossGroupLost(
                    time=time.time(),
                    generation=generation,
                    slot=None if worker is None else membership.slot_name(worker),
                    reason=reason,
                    worker=worker,
                    node=node,
                )
            )
        if node is not None:
            self._told.add(node)
        if first:
            await self._dispatcher.advance()

    def _is_new(self, node: str | None) -> bool:
        return node is not None and node not in self._told and len(self._told) < _MOST_NODES
