"""What an exception in a worker means: a peer is lost, or the worker itself is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

from elastic.config import HealthConfig
from elastic.coordinator.agents import START_S
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.link_tests import LinkTests
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol.causes import COLLECTIVE, DATA, STORAGE, USER_ERROR, Cause, entry_of

_PEER_LOSS_PATIENCE_S = 1.0
"""A peer's death is known within milliseconds of the exception that it causes."""

_LOOK_S = 10.0
"""A file system that has not answered by then is gone."""


class Troubles:
    """Settles what each exception was.

    Args:
        health: how long the loss of a node takes to show.
        membership: knows which replicas are broken.
        dispatcher: wakes those who wait for news.
        workers: loses those at fault.
        link_tests: find the connections that make a collective fail while all live.
        reads: see `CoordinatorConfig`.
    """

    def __init__(
        self,
        health: HealthConfig,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        link_tests: LinkTests,
        reads: Sequence[str] = (),
    ) -> None:
        self._node_s = health.node_timeout_s + _PEER_LOSS_PATIENCE_S
        self._membership, self._dispatcher, self._workers = membership, dispatcher, workers
        self._link_tests, self._reads = link_tests, reads
        self._look: asyncio.Future[bool] | None = None
        """Whether this machine can read them."""
        self._raised: dict[str, int | None] = {}
        """Worker whose own code raised, and it is not settled why -> its formation."""
        self._at_fault: set[str] = set()
        """Those of them that will be written off."""

    async def settle(
        self,
        worker: str,
        step: int | None,
        detail: str,
        cause: Cause,
        formed: int | None = None,
    ) -> Literal["peer", "own"]:
        """See `WorkerCalls.trouble`. A collective that failed may be the first sign of the loss
        of a whole node, which takes longer to show, or of a mate that ended together with its
        node's agent, of which the next agent tells; where none was lost, the connections between
        the replica's nodes are tried: who gets no answer from a bad one is not at fault. Workers
        of one replica that raise errors of their own at the same time are each at fault: the first
        to be written off explains no other. Who cannot go on is lost for its own cause, also where
        a peer is lost, too."""
        membership = self._membership
        patience_s = self._node_s if cause == COLLECTIVE else _PEER_LOSS_PATIENCE_S
        formation = formed or self._formation_of(worker)

        def broken() -> bool:
            return membership.replica_broken(worker, formed)

        if cause != COLLECTIVE:
            self._raised[worker] = formation
        try:
            if not entry_of(cause).lasts and not self._follows_alone(worker, cause, formed):
                await self._dispatcher.until(broken, patience_s)
                if cause == COLLECTIVE:
                    await self._await_agents(worker, broken)
                    if not broken():
                        await self._link_tests.explain(worker)
                if broken() and worker not in self._at_fault:
                    return "peer"
            if cause == STORAGE:
                cause = await self._cause_of_storage()
            self._at_fault |= {w for w, formed in self._raised.items() if formed == formation}
            await self._workers.lose(worker, cause, detail, step, formation)
            return "own"
        finally:
            self._raised.pop(worker, None)
            self._at_fault.discard(worker)

    async def _cause_of_storage(self) -> Cause:
        """What it means that a machine does not see the run's storage. Before the first roster
        stands it is a wrong setting. Later the storage was there once: the machine is at fault
        where it is seen here, and nobody where it is gone, which those who train need not notice:
        they have its files in memory (docs/decisions/069)."""
        if self._membership.call == "start":
            return USER_ERROR
        if self._look is None or self._look.done():  # one that hangs keeps a thread
            look = asyncio.to_thread(lambda: all(map(_can_be_read, self._reads)))
            self._look = asyncio.ensure_future(look)
        try:
            seen = await asyncio.wait_for(asyncio.shield(self._look), _LOOK_S)
        except asyncio.TimeoutError:  # in Python 3.10 not the builtin one
            seen = False
        return STORAGE if seen else DATA

    async def _await_agents(self, worker: str, broken: Callable[[], bool]) -> None:
        """Waits while a mate of `worker` has no agent that beats, as long as one may take to start:
        nobody else tells of its end. What the agent has to tell comes with its first beats."""
        until_s = time.monotonic() + START_S
        watched = self._mates_watched(worker)
        while not watched and not broken() and time.monotonic() < until_s:
            # Looked at before the wait: whose agent beats by now has that long to tell.
            watched = self._mates_watched(worker)
            await self._dispatcher.until(broken, _PEER_LOSS_PATIENCE_S)

    def _mates_watched(self, worker: str) -> bool:
        replica = self._membership.places.of(worker)
        return replica is None or all(map(self._workers.is_told_of, replica.workers))

    def _formation_of(self, worker: str) -> int | None:
        """Number of the replica that a worker is in; where a peer's loss has just broken that, of
        the one that the roster still names: both raised in the same try."""
        now = self._membership.places.formation_of(worker)
        if now is not None:
            return now
        broken = self._membership.roster.replica_of(worker)
        return None if broken is None else broken.formed

    def _follows_alone(self, worker: str, cause: Cause, formed: int | None) -> bool:
        alone = formed is None and worker in self._membership.roster.followers
        return alone and cause != COLLECTIVE


def _can_be_read(path: str) -> bool:
    """Where a server answers no reads, its files may still seem to be there."""
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError:
        return False
    return True
