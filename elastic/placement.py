"""Which placement groups a run asks Ray for, which it gives up, where it starts workers. Pure.

A placement group holds the workers of one replica, or one spare. Those that Ray has not placed yet
are what the run still waits for: Ray's autoscaler reads them as demand, and an added node serves
them. Their number is bounded, so that a large run does not fill Ray's queue; when one is placed the
next is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MOST_PENDING_GROUPS = 8
"""Groups that wait for machines at once. Ray tries each of them whenever resources change, and an
autoscaler starts machines for all of them together."""

GroupState = Literal["pending", "placed", "lost"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The workers of a run when all its machines are there."""

    replicas: int
    """Most replicas."""
    workers_per_replica: int
    """Shard x tensor degree."""
    spares: int
    """Workers beyond them."""

    @property
    def workers(self) -> int:
        """All of them."""
        return self.replicas * self.workers_per_replica + self.spares


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """What is known of one placement group."""

    name: str
    """Unique in the run."""
    size: int
    """Its bundles; each is the seat of one worker."""
    state: GroupState
    """`pending`: never placed so far; `lost`: was placed, and a node of it is gone."""
    living: frozenset[int]
    """Bundles whose worker lives."""
    starting: frozenset[int]
    """Bundles whose worker is being started."""
    draining: frozenset[int]
    """Bundles on nodes that Ray drains."""


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """What to do now."""

    give_up: tuple[str, ...]
    """Groups to remove."""
    ask: tuple[int, ...]
    """Sizes of the groups to ask for."""
    fill: tuple[tuple[str, int], ...]
    """(group, bundle) to start a worker in."""


def plan_placement(wanted: Wanted, groups: Sequence[GroupView], most_pending: int) -> PlacementPlan:
    """Follows the machines: fills empty seats, lets go of what has gone, asks for what is missing.

    A group with no worker left and no machine is given up: asking anew bounds what is pending and
    lets a smaller piece fit. One with survivors is kept, and Ray finds other places for its lost
    bundles. Workers on draining nodes do not count: their successors are asked for at once.

    Args:
        wanted: the workers of the whole run.
        groups: the groups that there are.
        most_pending: groups that may wait for machines at once.
    """
    kept = [group for group in groups if not _is_hopeless(group)]
    have = sum(group.size - len(group.draining) for group in kept)
    waiting = sum(group.state != "placed" for group in kept)
    return PlacementPlan(
        give_up=tuple(group.name for group in groups if _is_hopeless(group)),
        ask=plan_group_sizes(wanted, have, most_pending - waiting),
        fill=tuple(
            (group.name, bundle)
            for group in kept
            if group.state == "placed"
            for bundle in range(group.size)
            if bundle not in group.living | group.starting | group.draining
        ),
    )


def plan_group_sizes(wanted: Wanted, have: int, most: int) -> tuple[int, ...]:
    """Sizes of up to `most` groups towards `wanted`: what completes a replica each, then spares.

    Args:
        wanted: the workers of the whole run.
        have: workers that are there or on their way.
        most: groups to ask for at most.
    """
    sizes: list[int] = []
    each = wanted.workers_per_replica
    while have < wanted.workers and len(sizes) < most:
        sizes.append(each - have % each if have < wanted.replicas * each else 1)
        have += sizes[-1]
    return tuple(sizes)


def _is_hopeless(group: GroupView) -> bool:
    return not group.living and (group.state == "lost" or len(group.draining) == group.size)
