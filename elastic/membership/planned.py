"""Whether to regroup after a step, with nothing broken, and which replicas leave then. Pure."""

from __future__ import annotations

from elastic.membership.heals import Heals
from elastic.membership.places import Places
from elastic.protocol.events import RegroupReason
from elastic.protocol.roster import Replica


def plan_departures(
    places: Places, heals: Heals, min_replicas: int, max_replicas: int
) -> list[Replica]:
    """Replicas that the others can do without: on machines that will go; and those on several nodes
    for which others, each on one node, have formed beside them and have the state."""
    draining = places.draining
    gone = {replica.formed for replica in draining} | heals.behind
    remaining = sum(formed not in gone for formed in places.standing)
    surplus = 0 if heals.behind else max(0, remaining - max_replicas)
    leaving = draining if remaining >= max(1, min_replicas) else []
    return [*leaving, *places.straddling[:surplus]]


def all_copies_go(places: Places, heals: Heals) -> bool:
    """Whether there is state, and no replica has it that stays."""
    having = [r for r in places.standing.values() if r.formed not in heals.behind]
    return bool(having) and not any(places.retired.isdisjoint(r.workers) for r in having)


def decide_planned(
    places: Places,
    heals: Heals,
    min_replicas: int,
    max_replicas: int,
    *,
    follower_goes: bool,
    mendable: bool,
    uneven: bool,
) -> RegroupReason | None:
    """Why to regroup after a step. A heal is not disturbed for a replica that could join later.

    Args:
        places: who has a place.
        heals: who lacks state.
        min_replicas: fewest to train with.
        max_replicas: most.
        follower_goes: whether one that follows is on a machine that will go, or is to end.
        mendable: whether what is left of a replica can be made whole.
        uneven: whether a replica has two lanes more than another: one of them got its state while a
            fault was met, in which all lanes were kept where they were.
    """
    leaving = plan_departures(places, heals, min_replicas, max_replicas)
    if leaving:
        return "move" if leaving[0] in places.straddling else "drain"
    if follower_goes:
        return "drain"
    if heals.again:
        return "heal"
    if heals.behind:
        return None
    ready = len(places.forming) > places.unready
    if heals.plan or uneven:
        return "heal"
    return "grow" if ready else "repair" if mendable else None
