"""What the workers of a roster have found of their connections, and who is taken out for it."""

from __future__ import annotations

import time

from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.links import FailedLink, describe, find_failed, plan_removals
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import LINK
from elastic.protocol.messages import LinkTest

_MOST_NOTED = 100
"""Failed connections in an event."""


class LinkTests:
    """Takes in the tests of a roster. Once all of it have told, those whom the failed connections
    have in common are lost.

    Args:
        membership: knows the roster, and is told what was found.
        workers: loses them.
        records: where it is written down.
    """

    def __init__(self, membership: Membership, workers: Workers, records: RunLog) -> None:
        self._membership, self._workers, self._records = membership, workers, records
        self._generation = 0
        self._found: dict[str, LinkTest] = {}

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
        membership, roster = self._membership, self._membership.roster
        failed = find_failed(roster, self._found)
        nodes = {worker: identity.node for worker, identity in membership.members.items()}
        removed = plan_removals(
            failed,
            roster,
            nodes,
            idle=membership.places.idle,
            least=membership.config.min_replicas,
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
        membership.links_tested = describe(failed, nodes)
        self._workers.shun({nodes[worker] for worker in removed})
        for worker in sorted(removed):
            await self._workers.kill(worker, LINK, _describe_for(worker, failed, nodes))


def _describe_for(worker: str, failed: list[FailedLink], nodes: dict[str, str]) -> str:
    """The evidence against a worker."""
    own = [link for link in failed if worker in link[:2]]
    return f"connections fail, and no worker on its node gets a slot now: {describe(own, nodes)}"
