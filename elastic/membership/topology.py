"""Who of the free workers form a replica, by the nodes that they are on. Pure.

Inside a replica they talk in every layer, so it is best on one node. Where none has room for it, it
takes as few nodes as it can, and the workers of a tensor group stay together.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.protocol.messages import Identity


@dataclass(frozen=True, kw_only=True, order=True)
class Spread:
    """How far a replica reaches over nodes; the less the better."""

    split: int
    """Tensor groups that are not on one node."""
    nodes: int
    """Nodes that it is on."""


def find_spread(workers: Sequence[str], members: Mapping[str, Identity], tensor: int) -> Spread:
    """How far the replica of `workers`, by rank, reaches. `tensor` of them make a tensor group."""
    nodes = [members[worker].node for worker in workers]
    groups = (set(nodes[at : at + tensor]) for at in range(0, len(nodes), tensor))
    return Spread(split=sum(len(group) > 1 for group in groups), nodes=len(set(nodes)))


def holds_together(members: Iterable[Identity], workers: int) -> bool:
    """Whether there is a node with so many of the run's workers, free or not."""
    counts = Counter(member.node for member in members)
    return max(counts.values(), default=0) >= workers


def plan_seats(
    pool: Iterable[Identity], *, size: int, together: int, most: int
) -> list[tuple[str, ...]]:
    """The workers of up to `most` new replicas, each node by node.

    Of the nodes that have room for a replica it takes the fullest, so that large pieces are left
    for others; where none has, one node after the other, the emptiest first. Of equals it takes
    that of the lowest rank: neighbours in rank are neighbours on the network.

    Args:
        pool: workers without a place.
        size: workers in a replica.
        together: how many of them, neighbours in it, must be on one node; a divisor of `size`.
        most: replicas that there is room for.
    """
    free: dict[str, list[Identity]] = defaultdict(list)
    for worker in sorted(pool, key=lambda one: (one.rank, one.worker)):
        free[worker.node].append(worker)
    pieces = _Pieces({node: len(workers) // together for node, workers in free.items()})
    seats: list[tuple[str, ...]] = []
    while len(seats) < most and pieces.total >= size // together:
        taken = pieces.take(size // together)
        seat = [one for node, count in taken for one in _cut(free[node], count * together)]
        seats.append(tuple(one.worker for one in seat))
    return seats


def _cut(workers: list[Identity], count: int) -> list[Identity]:
    """Takes the first `count` out of a list."""
    head = workers[:count]
    del workers[:count]
    return head


class _Pieces:
    """Nodes by how many pieces of a replica each has room for.

    Args:
        rooms: node -> pieces, the nodes in order of preference.
    """

    def __init__(self, rooms: Mapping[str, int]) -> None:
        self.total = sum(rooms.values())
        self._nodes = list(rooms)
        self._by_room: dict[int, list[int]] = defaultdict(list)  # numbers of nodes, as heaps
        for number, room in enumerate(rooms.values()):
            self._put(number, room)

    def _put(self, number: int, room: int) -> None:
        if room:
            heapq.heappush(self._by_room[room], number)

    def take(self, pieces: int) -> list[tuple[str, int]]:
        """Takes so many pieces, which there are. Returns nodes and how many of each."""
        self.total -= pieces
        taken: list[tuple[int, int, int]] = []
        while pieces:
            rooms = [room for room, numbers in self._by_room.items() if numbers]
            room = min((room for room in rooms if room >= pieces), default=max(rooms))
            count = min(room, pieces)
            taken.append((heapq.heappop(self._by_room[room]), count, room - count))
            pieces -= count
        for number, _, left in taken:
            self._put(number, left)
        return [(self._nodes[number], count) for number, count, _ in sorted(taken)]
