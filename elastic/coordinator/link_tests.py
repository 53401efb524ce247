"""What is found of the connections between workers, and who is taken out for it.

collectives across replicas fail again and again ──► the workers of the roster try their connections
a replica on several nodes stands still ──► the agents of the nodes try those between them
a collective of a replica has failed    ──► the same
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from elastic.coordinator.agents import NodeAgents
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.links import (
    FailedLink,
    between_two,
    between_workers,
    describe,
    find_failed,
    plan_removals,
)
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import LINK, PATH
from elastic.protocol.messages import LinkTest
from trainer.backend.link_exchange import LINK_BYTES

_MOST_NOTED = 100
"""Failed connections in an event."""

_WITNESSES = 2
"""Nodes beside those of a replica that stands still, at least: they tell which end of a connection
is bad."""

_MOST_NODES = 16
"""Of such a replica that are tried at once, with as many witnesses: each sends to all others, and
is told of all in one small message."""

_STILL_BOUND_S = 1.5
"""How long a message may take between two nodes where workers stand still. A good connection takes
milliseconds, and may lose its first packet once."""


class LinkTests:
    """Takes in the tests of a roster. Once all of it have told, those whom the failed connections
    have in common are lost.

    Args:
        membership: knows the roster, and is told what was found.
        workers: loses them.
        agents: try connections between nodes.
        records: where it is written down.
    """

    def __init__(
        self, membership: Membership, workers: Workers, agents: NodeAgents, records: RunLog
    ) -> None:
        self._membership, self._workers = membership, workers
        self._agents, self._records = agents, records
        self._generation = 0
        self._found: dict[str, LinkTest] = {}
        self._trying = asyncio.Lock()
        """An agent has one door for these tests."""
        self._explaining = asyncio.Lock()
        """A collective fails for a whole replica: its connections are tried for who tells first."""

    async def take(self, worker: str, test: LinkTest) -> None:
        """A worker has tried its connections. Who is lost meanwhile, or calls all away, explains
        more than the rest of the tests would."""
        roster, call = self._membership.roster, self._membership.call
        if test.generation != roster.generation or call not in (None, "boundary"):
            return
        if test.generation != self._generation:
            self._generation, self._found = test.generation, {}
        told = worker in self._found
        self._found[worker] = test
        if not told and self._found.keys() >= {*roster.workers, *roster.followers}:
            await self._conclude()

    async def _conclude(self) -> None:
        failed = find_failed(self._membership.roster, self._found)
        self._membership.links_tested = describe(failed, self._nodes)
        await self.remove(failed)

    async def try_between(self, workers: Sequence[str]) -> list[FailedLink]:
        """Has the agents try the connections between the nodes of `workers`, who do not get on and
        may be in no roster yet, and those to some others of the roster. Where there are many nodes,
        those of the first workers count. What fails once may have been late: see `try_again`.

        Returns:
            Those that failed, of workers that are still there; none where all are on one node.
        """
        nodes = self._nodes
        there = (*self._membership.roster.workers, *workers)
        members = {w: nodes[w] for w in there if w in nodes}
        theirs = list(dict.fromkeys(members[w] for w in workers if w in members))
        if len(theirs) < 2:
            return []
        others = dict.fromkeys(node for node in members.values() if node not in theirs)
        theirs = theirs[:_MOST_NODES]  # as many witnesses, or those who agree would outvote them
        asked = [*theirs, *[*others][: max(_WITNESSES, len(theirs))]]
        async with self._trying:
            short = await self._agents.try_links(asked, _STILL_BOUND_S)
        left = {w: node for w, node in members.items() if w in self._membership.members}
        return between_workers(short, left, LINK_BYTES, _STILL_BOUND_S)

    async def try_again(
        self, failed: Sequence[FailedLink], workers: Sequence[str]
    ) -> list[FailedLink]:
        """Those that `try_between` found to fail, and that fail again."""
        if not failed:
            return []
        before = {link[:2] for link in failed}
        return [link for link in await self.try_between(workers) if link[:2] in before]

    async def explain(self, worker: str) -> None:
        """A collective of the replica that `worker` is in, or builds, has failed for it, and nobody
        was lost: where connections between its nodes fail, takes out whom these have in common.
        Peers whom it failed for as well wait meanwhile: what comes of the first explains the
        others."""
        membership = self._membership
        async with self._explaining:
            replica = membership.places.of(worker)
            if replica is None or membership.replica_broken(worker, replica.formed):
                return
            failed = [
                link
                for link in await self.try_between(replica.workers)
                if not {*link[:2]}.isdisjoint(replica.workers)
            ]
            failed = await self.try_again(failed, replica.workers)
            if failed and not membership.replica_broken(worker, replica.formed):
                await self.remove(failed, lost_anyway=[worker])

    async def remove(
        self, failed: Sequence[FailedLink], *, lost_anyway: Collection[str] = ()
    ) -> set[str]:
        """Notes which connections have failed, and takes out those workers whom they have in
        common. `lost_anyway`: see `plan_removals`. Returns them."""
        membership, roster, nodes = self._membership, self._membership.roster, self._nodes
        removed = plan_removals(
            failed,
            roster,
            nodes,
            idle=membership.places.idle,
            least=membership.config.min_replicas,
            forming=membership.places.forming.values(),
            lost_anyway=lost_anyway,
        )
        self._records.note(
            events.LinksTested(
                time=time.time(),
                generation=roster.generation,
                count=len(failed),
                failed=[describe([link], nodes) for link in failed[:_MOST_NOTED]],
                removed=sorted(removed),
            )
        )
        either = between_two(removed, failed, nodes)
        self._workers.shun({nodes[worker] for worker in removed})
        for worker in sorted(removed):
            cause = PATH if worker in either else LINK
            await self._workers.kill(worker, cause, _describe_for(worker, failed, nodes))
        return removed

    @property
    def _nodes(self) -> dict[str, str]:
        """Worker -> its node."""
        return {worker: one.node for worker, one in self._membership.members.items()}


def _describe_for(worker: str, failed: Sequence[FailedLink], nodes: dict[str, str]) -> str:
    """The evidence against a worker."""
    own = [link for link in failed if worker in link[:2]]
    return f"connections fail, and no worker on its node gets a slot now: {describe(own, nodes)}"
