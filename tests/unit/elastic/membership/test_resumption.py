from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.membership.resumption import Resumption, plan_resumption
from elastic.protocol.messages import Identity, Standing
from elastic.protocol.roster import Replica


def standing(worker: str, formed: int, rank: int, **more: object) -> Standing:
    identity = Identity(worker=worker, rank=int(worker[1:]), node="n", pid=1)
    known: dict[str, Any] = {
        "replica": formed - 1,
        "position": formed - 1,
        "generation": 3,
        "replicas": 2,
        "lanes": (formed - 1,),
        "proven": True,
        "built": True,
    }
    return Standing(identity=identity, formed=formed, rank=rank, **{**known, **more})


TWO_BY_TWO = [
    standing("d3", 2, 1),
    standing("a0", 1, 0),
    standing("c2", 2, 0),
    standing("b1", 1, 1),
]
SPARE = Standing(identity=Identity(worker="e4", rank=4, node="n", pid=1))


def resume(standings: list[Standing]) -> Resumption:
    return plan_resumption(standings, workers_per_replica=2, max_replicas=4)


def test_workers_at_work_make_up_the_roster_they_are_in() -> None:
    found = resume([*TWO_BY_TWO, SPARE])
    assert found.consistent
    assert found.roster.generation == 3
    assert found.roster.replicas == (
        Replica(index=0, formed=1, workers=("a0", "b1")),
        Replica(index=1, formed=2, workers=("c2", "d3")),
    )
    assert found.roster.lanes == {0: (0,), 1: (1,)}
    assert found.standing == found.roster.replicas
    assert found.forming == found.broken == () and not found.behind and not found.torn


def test_a_replica_that_lost_a_worker_does_not_stand() -> None:
    found = resume(TWO_BY_TWO[1:])
    assert not found.consistent and not found.roster.lanes
    assert [replica.index for replica in found.standing] == [0]
    assert found.roster.replicas[1].workers == ("c2", "lost rank 1")


def test_a_replica_that_had_left_is_not_missed() -> None:
    left = [standing(w, 3, r, generation=2, replicas=3) for r, w in enumerate(("e4", "f5"))]
    found = resume([*TWO_BY_TWO, *left])
    without = resume(TWO_BY_TWO)
    assert (found.roster, found.standing) == (without.roster, without.standing)
    assert found.consistent and [replica.formed for replica in found.broken] == [3]


def test_a_replica_whose_index_another_one_has_had_left() -> None:
    left = [standing(w, 1, r, generation=2, replica=1) for r, w in enumerate(("e4", "f5"))]
    unproven = [replace(s, proven=False) for s in TWO_BY_TWO if s.formed == 2]
    found = resume([*unproven, *left])
    assert [replica.formed for replica in found.standing] == [2] and not found.consistent


def test_a_replica_that_is_gone_altogether_is_missed() -> None:
    found = resume([s for s in TWO_BY_TWO if s.formed == 1])
    assert not found.consistent


def test_a_regroup_half_handed_out_is_no_roster() -> None:
    late = [replace(s, generation=2) if s.formed == 2 else s for s in TWO_BY_TWO]
    found = resume(late)
    assert found.roster.generation == 3 and not found.consistent
    assert len(found.standing) == 2, "both still hold their state"


def test_a_replica_of_which_one_half_trains_and_the_other_waits_does_not_stand() -> None:
    late = [replace(s, generation=2) if s.identity.worker == "c2" else s for s in TWO_BY_TWO]
    found = resume(late)
    assert found.torn == {"c2", "d3"} and not found.consistent and not found.broken
    assert [replica.index for replica in found.standing] == [0]
    assert [replica.index for replica in found.roster.replicas] == [0, 1], "both are called"


def test_a_replica_of_an_older_roster_is_no_sure_source() -> None:
    """It may have left before the last one, or have had no answer in it yet."""
    late = [replace(s, generation=2) if s.formed == 2 else s for s in TWO_BY_TWO]
    assert resume(late).doubtful == {2}
    assert resume(TWO_BY_TWO).doubtful == frozenset()


def test_groups_that_no_step_has_proven_are_made_again() -> None:
    found = resume([replace(s, proven=False) for s in TWO_BY_TWO])
    assert not found.consistent and len(found.standing) == 2


def test_formations_and_newcomers_are_known_again() -> None:
    forming = [standing("f5", 3, rank, generation=0) for rank in (0,)]
    whole = [standing(w, 4, r, generation=0) for r, w in enumerate(("g6", "h7"))]
    new = [replace(s, source=0, behind=s.rank == 1) if s.formed == 2 else s for s in TWO_BY_TWO]
    found = resume([*new, *forming, *whole])
    assert [replica.formed for replica in found.forming] == [4]
    assert [replica.formed for replica in found.broken] == [3]
    assert found.behind == {"d3": 2}
    assert found.heals == ((1, 0, (1,)),)


def test_a_formation_that_one_of_its_workers_still_builds_is_broken() -> None:
    """Its process group was to meet at the store that is lost."""
    forming = [standing(w, 3, r, generation=0) for r, w in enumerate(("e4", "f5"))]
    assert [r.formed for r in resume([*TWO_BY_TWO, *forming]).forming] == [3]
    forming[1] = replace(forming[1], built=False)
    found = resume([*TWO_BY_TWO, *forming])
    assert found.consistent and not found.forming
    assert [replica.workers for replica in found.broken] == [("e4", "f5")]


def test_a_formation_whose_index_another_one_has_was_given_up() -> None:
    """Its workers had built it by the time they were called."""
    given_up = [standing(w, 1, r, generation=0) for r, w in enumerate(("e4", "f5"))]
    later = [replace(s, formed=3, replica=0) if s.formed == 1 else s for s in TWO_BY_TWO]
    found = resume([*later, *given_up])
    assert not found.forming and [replica.formed for replica in found.broken] == [1]
    assert [replica.formed for replica in found.standing] == [3, 2]


def test_a_successor_that_forms_beside_all_others_is_given_up() -> None:
    """The one that it was to succeed may be gone, and its own workers called away."""
    beside = [standing(w, 5, r, generation=0) for r, w in enumerate(("e4", "f5"))]
    found = resume([*TWO_BY_TWO, *beside])
    assert found.consistent and not found.forming
    assert [replica.index for replica in found.broken] == [4]
    entered = [standing(w, 5, r, position=2) for r, w in enumerate(("e4", "f5"))]
    three = [replace(s, replicas=3) for s in (*TWO_BY_TWO, *entered)]
    assert [replica.index for replica in resume(three).standing] == [0, 1, 4], "the roster counts"


def test_a_replica_may_have_the_index_of_a_younger_one_that_left() -> None:
    """It was a successor, and got that index when the younger one left, which is there yet."""
    names = enumerate(("e4", "f5"))
    left = [standing(w, 3, r, generation=2, replica=0, position=0) for r, w in names]
    found = resume([*TWO_BY_TWO, *left])
    assert found.consistent and [replica.formed for replica in found.standing] == [1, 2]
    assert [replica.formed for replica in found.broken] == [3]


def test_a_successor_whose_extra_index_another_one_forms_with_may_have_got_a_place() -> None:
    """It was numbered anew and had not heard of it; the next successor forms with its old index."""
    three = [replace(s, replicas=3) for s in TWO_BY_TWO]
    names = enumerate(("e4", "f5"))
    old = [standing(w, 3, r, generation=2, replica=4, replicas=3) for r, w in names]
    beside = [standing(w, 5, r, generation=0, replica=4) for r, w in enumerate(("g6", "h7"))]
    found = resume([*three, *old, *beside])
    assert sorted(replica.formed for replica in found.standing) == [1, 2, 3]
    assert found.doubtful == {3} and [replica.formed for replica in found.broken] == [5]


def test_a_successor_is_kept_while_what_is_left_of_the_one_before_follows() -> None:
    """The remnant is of the newest roster, and the successor of none yet; both have its index."""
    (remnant,) = [replace(s, position=1, replicas=1) for s in TWO_BY_TWO if s.rank and s.replica]
    alone = [replace(s, replicas=1) for s in TWO_BY_TWO if not s.replica]
    successor = [standing(w, 3, r, generation=0, replica=1) for r, w in enumerate(("e4", "f5"))]
    found = resume([*alone, remnant, *successor])
    assert [replica.formed for replica in found.forming] == [3]
    assert [replica.formed for replica in found.standing] == [1]


def test_the_newest_roster_counts_where_one_worker_alone_has_heard_of_it() -> None:
    """The next one must not have its number."""
    (heard, *others) = sorted(TWO_BY_TWO, key=lambda s: s.rank)
    found = resume([*others, replace(heard, generation=4)])
    assert found.roster.generation == 4


def test_nobody_is_nothing() -> None:
    found = resume([SPARE])
    assert found.roster.generation == 0 and not found.consistent and not found.standing
