"""Which placement groups a run asks Ray for, which it gives up, where it starts workers. Pure.

A placement group holds the workers of one replica, or one spare. Those that Ray has not placed yet
are what the run still waits for: Ray's autoscaler reads them as demand, and an added node serves
them. Their number is bounded, so that a large run does not fill Ray's queue; when one is placed the
next is asked for.

Where workers are to be on one node, seats on what is left of nodes are of no use to a replica. They
count as spares at most, so that whole nodes are asked for; a group of nothing else is given up
before anyone is started in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

MOST_PENDING_GROUPS = 8
"""Groups that wait for machines at once. Ray tries each of them whenever resources change, and an
autoscaler starts machines for all of them together."""

START_PATIENCE_S = 5.0
"""How long a start waits for further machines once it has some. Free ones are reserved at once."""

GroupState = Literal["pending", "placed", "lost"]

StartDecision = Literal["start", "wait", "give_back", "give_up"]
"""`start`: with what is placed; `give_back`: all of it, to wait for the whole."""

Seat = tuple[str, int]
"""Group and bundle."""

TOLD_S = 60.0
"""A worker that has had its work for so long and has not said hello is told of: it imports."""
SILENT_S = 600.0
"""And one that has not by then is ended: several times what imports from a slow disk take."""

_EARLY_S = 20.0
"""A worker that ends so soon after its hello has done next to nothing."""
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The workers of a run when all its machines are there."""

    replicas: int
    """Most replicas."""
    workers_per_replica: int
    """Shard x tensor degree."""
    spares: int
    """Workers beyond them."""
    together: int = 1
    """How many of a replica's are to be on one node; a divisor of them."""
    min_replicas: int = 1
    """Fewest that a run starts with. So many form whatever nodes their workers are on."""

    @property
    def slots(self) -> int:
        """Those of the replicas."""
        return self.replicas * self.workers_per_replica

    @property
    def workers(self) -> int:
        """All of them."""
        return self.slots + self.spares

    @property
    def least(self) -> int:
        """Those of the smallest layout."""
        return self.min_replicas * self.workers_per_replica


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
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Bundle -> node, of those that have one."""


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """What to do now."""

    give_up: tuple[str, ...]
    """Groups to remove."""
    ask: tuple[int, ...]
    """Sizes of the groups to ask for."""
    on_one_node: bool = False
    """Whether each of these is to be on one node, however long that takes."""
    fill: tuple[Seat, ...]
    """Where to start a worker."""


class FutileStarts:
    """Tells workers that are lost on the way, however many, from workers that never get going.

    A start is futile when its worker ends before any worker started since the last count of hellos
    has said hello. Those that fail beside workers that have got going say nothing of these.
    """

    def __init__(self) -> None:
        self._hellos = self._settled = 0
        self.in_a_row = 0
        """Times that only futile starts were seen."""

    def count(self, *, hellos: int, newest: float, launches: int, heard: bool = False) -> None:
        """Workers have ended.

        Args:
            hellos: workers that have said hello so far.
            newest: launch of the latest one among those that have ended.
            launches: workers launched so far.
            heard: whether one of those that have ended had said hello.
        """
        if hellos > self._hellos:
            self._hellos, self._settled, self.in_a_row = hellos, launches, 0
        elif heard:
            self.in_a_row = 0
        elif newest > self._settled:
            self.in_a_row += 1


class Silence:
    """Which workers have long had their work, and have not said hello to the coordinator: an import
    or a driver may hang. Before they do no agent watches them, and the start waits for them."""

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        self._told: set[int] = set()

    def late(self, launches: Iterable[int], now_s: float) -> list[int]:
        """Those of these workers, by their launches, of whom it should be asked whether they have
        said hello. They have had their work since they were first seen here."""
        seen = {launch: self._begun_s.setdefault(launch, now_s) for launch in launches}
        return [launch for launch, begun_s in seen.items() if now_s - begun_s > TOLD_S]

    def judge(
        self, late: Iterable[int], silent: Collection[int], now_s: float
    ) -> tuple[list[int], list[int]]:
        """Which of the `late` are to be told of now, and which are to be ended.

        Args:
            late: of whom it was asked.
            silent: who of them has not said hello.
            now_s: on the same clock.
        """
        self._begun_s |= dict.fromkeys(set(late) - set(silent), inf)  # they are asked for no more
        told = [launch for launch in silent if launch not in self._told]
        self._told.update(told)
        return told, [one for one in silent if now_s - self._begun_s[one] > SILENT_S]


class Pauses:
    """How long a seat stays empty when its workers end early: not at all after the first, then ever
    longer. A broken machine is not tried all the time, beside a run that is well."""

    def __init__(self) -> None:
        self._early: dict[Seat, int] = {}
        self._until_s: dict[Seat, float] = {}

    def ended(self, seat: Seat, now_s: float, *, there_s: float | None) -> None:
        """The worker in `seat` has ended, or did not start.

        Args:
            seat: where it was to work.
            now_s: on any clock that rises.
            there_s: since its hello; None: it did not say it, however long its imports took.
        """
        is_early = there_s is None or there_s < _EARLY_S
        early = self._early[seat] = self._early.get(seat, 0) + 1 if is_early else 0
        if early > 1:
            self._until_s[seat] = now_s + min(2.0 ** (early - 2), _LONGEST_PAUSE_S)

    def over(self, seat: Seat, now_s: float) -> bool:
        """Whether a worker may be started in `seat`."""
        return now_s >= self._until_s.get(seat, now_s)


def decide_start(
    *, placed: int, least: int, whole: bool, since_s: float, left_s: float
) -> StartDecision:
    """Whether a run starts with the machines that Ray has placed its groups on. Pure.

    Fewer than the least are not held for long: two runs that wait, and have half each, would wait
    for each other.

    Args:
        placed: workers of the groups that are placed.
        least: workers of the smallest layout.
        whole: whether no other group is pending.
        since_s: since a group was placed last.
        left_s: of the time in which the smallest layout is waited for.
    """
    if whole or (placed >= least and since_s >= START_PATIENCE_S):
        return "start"
    if placed < least and left_s <= 0:
        return "give_up"
    if 0 < placed < least and since_s >= START_PATIENCE_S:
        return "give_back"
    return "wait"


def plan_placement(wanted: Wanted, groups: Sequence[GroupView], most_pending: int) -> PlacementPlan:
    """Follows the machines: fills empty seats, lets go of what has gone, asks for what is missing.

    A group with no worker left and no machine is given up: asking anew bounds what is pending and
    lets a smaller piece fit. One with survivors is kept, and Ray finds other places for its lost
    bundles. Workers on draining nodes do not count: their successors are asked for at once.

    Ray packs a group on as few nodes as it can, which may be too many. Where more seats than there
    are spares lack their like on the node, each piece that is to be on one node is asked for by
    itself, and waits for a node with room for it.

    Args:
        wanted: the workers of the whole run.
        groups: the groups that there are.
        most_pending: groups that may wait for machines at once.
    """
    there = [group for group in groups if not _is_hopeless(group)]
    before = _count_seats(wanted, there)
    kept, have = _without_useless(wanted, there, before)
    names = {group.name for group in kept}
    return PlacementPlan(
        give_up=tuple(group.name for group in groups if group.name not in names),
        ask=plan_group_sizes(
            wanted,
            have.slots,
            most_pending - sum(group.state != "placed" for group in kept),
            others=have.others,
            piece=wanted.together if before.apart else wanted.workers_per_replica,
        ),
        on_one_node=before.apart,
        fill=tuple(
            (group.name, bundle)
            for group in kept
            if group.state == "placed"
            for bundle in range(group.size)
            if bundle not in group.living | group.starting | group.draining
        ),
    )


def plan_group_sizes(
    wanted: Wanted, have: int, most: int, *, others: int = 0, piece: int | None = None
) -> tuple[int, ...]:
    """Sizes of up to `most` groups towards `wanted`: what completes a replica each, then spares.

    Args:
        wanted: the workers of the whole run.
        have: workers that are there or on their way.
        most: groups to ask for at most.
        others: workers beside them that make no replica, and do as spares.
        piece: what each group completes, where it is not a replica.
    """
    sizes: list[int] = []
    piece = piece or wanted.workers_per_replica
    while have + others < wanted.workers or have < wanted.slots:
        if len(sizes) >= most:
            break
        sizes.append(piece - have % piece if have < wanted.slots else 1)
        have += sizes[-1]
    return tuple(sizes)


@dataclass(frozen=True, kw_only=True)
class _Seats:
    """What seats are good for."""

    slots: int
    """Replicas can be made of them, as far as the run wants any."""
    pieces: int
    """What is to be on one node, and is."""
    others: int
    """The rest: spares at most."""
    apart: bool
    """Whether these are more than are wanted, as they lack their like on their nodes."""
    torn: frozenset[str]
    """Nodes with seats that lack their like there."""


def _count_seats(wanted: Wanted, groups: Iterable[GroupView]) -> _Seats:
    """As membership makes replicas (`Formations`): where a node holds so many as are to be
    `together`, of such pieces alone, beyond `min_replicas`. Of a group without nodes yet it is
    hoped that its pieces find one each."""
    rooms, coming, hoped, together = Counter[str](), 0, 0, wanted.together
    for group in groups:
        seats = set(range(group.size)) - group.draining
        placed = [group.nodes[seat] for seat in seats if seat in group.nodes]
        rooms.update(placed)
        coming += len(seats) - len(placed)
        hoped += (len(seats) - len(placed)) // together
    there = sum(rooms.values()) + coming
    useful, pieces = there, sum(room // together for room in rooms.values())
    if pieces:
        whole = (pieces + hoped) * together
        useful = max(whole, min(there, wanted.min_replicas * wanted.workers_per_replica))
    slots = min(useful, wanted.slots)
    torn = frozenset(node for node, room in rooms.items() if room % together)
    apart = bool(torn) and there - slots > wanted.spares
    return _Seats(slots=slots, pieces=pieces, others=there - slots, apart=apart, torn=torn)


def _without_useless(
    wanted: Wanted, groups: list[GroupView], have: _Seats
) -> tuple[list[GroupView], _Seats]:
    """The groups without those in which nobody is, and of which no replica could be made; and what
    seats are left of those that the groups `have`."""
    kept = groups
    for group in sorted(groups, key=lambda each: -each.size) if have.apart else ():
        empty = group.state == "placed" and not group.living | group.starting
        if have.apart and empty and not have.torn.isdisjoint(group.nodes.values()):
            others = [other for other in kept if other is not group]
            left = _count_seats(wanted, others)
            if (left.slots, left.pieces) == (have.slots, have.pieces):
                kept, have = others, left
    return kept, have


def _is_hopeless(group: GroupView) -> bool:
    return not group.living and (group.state == "lost" or len(group.draining) == group.size)
