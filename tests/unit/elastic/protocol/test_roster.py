from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.protocol.roster import (
    Remnant,
    Replica,
    Roster,
    find_renumbered,
    next_roster,
    number_anew,
    plan_formations,
    plan_heals,
)


def replica(index: int, *workers: str, formed: int = 1) -> Replica:
    return Replica(index=index, formed=formed, workers=workers)


def roster(*replicas: Replica) -> Roster:
    return Roster(generation=1, replicas=replicas, lanes={})


def test_a_roster_knows_who_is_where() -> None:
    one, two = replica(0, "a", "b"), replica(2, "c", "d")
    both = roster(one, two)
    assert both.workers == ("a", "b", "c", "d")
    assert both.replica_of("d") is two
    assert both.replica_of("e") is None


def test_a_roster_knows_who_has_met_where() -> None:
    whole, remnant = replica(0, "a", "b", formed=4), Remnant(index=1, formed=2, workers={1: "d"})
    assert replace(roster(whole), generation=7, remnants=(remnant,)).met == {
        "replica/4": ("a", "b"),
        "cross/7/0": ("a",),
        "cross/7/1": ("b", "d"),
    }
    assert Roster(generation=0, replicas=(), lanes={}).met == {}


def test_neighbours_in_the_pool_form_the_free_replicas() -> None:
    formed = plan_formations(
        pool=["a", "b", "c", "d", "e"],
        taken={1},
        draining=0,
        max_replicas=4,
        workers_per_replica=2,
        next_number=7,
    )
    assert formed == (replica(0, "a", "b", formed=7), replica(2, "c", "d", formed=8))


@pytest.mark.parametrize(
    ("pool", "taken"), [([], set()), (["a"], set()), (["a", "b", "c", "d"], {0, 1})]
)
def test_nothing_forms_without_workers_or_room(pool: list[str], taken: set[int]) -> None:
    assert not plan_formations(
        pool=pool, taken=taken, draining=0, max_replicas=2, workers_per_replica=2, next_number=1
    )


@pytest.mark.parametrize(
    ("taken", "draining", "numbers"),
    [
        ({0, 1}, 1, [2]),
        ({0, 1}, 2, [2, 3]),
        ({0, 1, 2}, 1, []),
        ({0, 2}, 1, [1]),  # 2 is a successor already
        ({0, 1, 2, 3}, 3, []),  # of which two are successors that will leave, too
    ],
)
def test_successors_form_beside_those_that_will_leave(
    taken: set[int], draining: int, numbers: list[int]
) -> None:
    formed = plan_formations(
        pool=["a", "b", "c"],
        taken=taken,
        draining=draining,
        max_replicas=2,
        workers_per_replica=1,
        next_number=1,
    )
    assert [replica.index for replica in formed] == numbers


def test_a_successor_gets_the_number_of_the_one_that_left() -> None:
    stays, successor = replica(1, "b"), replica(3, "x", formed=9)
    left = number_anew([stays, successor], set(), max_replicas=3)
    assert left == [stays, replica(0, "x", formed=9)]
    assert find_renumbered([replica(0, "a", formed=8), stays, successor], left) == {3: 0}
    assert number_anew([stays, successor], {0}, max_replicas=3)[1].index == 2, "0 forms"
    assert number_anew([stays, successor], {0}, max_replicas=2) == [stays, successor], "no room yet"


def held(lanes: dict[int, tuple[int, ...]]) -> Roster:
    """A roster in which the formations have the numbers of the replicas, and these lanes."""
    replicas = tuple(replica(index, f"r{index}", formed=index) for index in lanes)
    return Roster(generation=1, replicas=replicas, lanes=lanes)


def test_without_an_interrupted_step_lanes_are_dealt_anew() -> None:
    after = next_roster(
        generation=5,
        staying=[replica(0, "a"), replica(2, "c")],
        joining=[replica(1, "b", formed=4)],
        total_lanes=6,
        before=None,
    )
    assert after.generation == 5
    assert [(r.index, r.workers) for r in after.replicas] == [(0, ("a",)), (2, ("c",)), (1, ("b",))]
    # Neighbouring lanes are whole subtrees: each replica gets a run of them, in its position. A
    # newcomer has no state to compute with.
    assert after.lanes == {0: (0, 1, 2), 2: (3, 4, 5), 1: ()}


def test_where_nobody_has_state_all_compute() -> None:
    after = next_roster(
        generation=1,
        staying=[],
        joining=[replica(1, "b"), replica(0, "a")],
        total_lanes=4,
        before=None,
    )
    assert [r.index for r in after.replicas] == [0, 1]
    assert after.lanes == {0: (0, 1), 1: (2, 3)}


def test_after_a_fault_only_the_lost_lanes_move() -> None:
    after = next_roster(
        generation=2,
        staying=[replica(1, "b", formed=1), replica(2, "c", formed=2)],
        joining=[],
        total_lanes=4,
        before=held({0: (0,), 1: (1, 3), 2: (2,)}),
    )
    assert after.lanes == {1: (1, 3), 2: (0, 2)}


def test_a_new_replica_inherits_no_lanes_of_its_index() -> None:
    after = next_roster(
        generation=2,
        staying=[replica(1, "b", formed=1)],
        joining=[replica(0, "x", formed=3)],
        total_lanes=2,
        before=held({0: (0,), 1: (1,)}),
    )
    assert after.lanes == {0: (), 1: (0, 1)}


def test_a_replica_with_a_new_number_keeps_its_lanes() -> None:
    after = next_roster(
        generation=2,
        staying=[replica(0, "c", formed=2)],
        joining=[],
        total_lanes=3,
        before=held({0: (0,), 1: (1,), 2: (2,)}),
    )
    assert after.lanes == {0: (0, 1, 2)}
    before = held({0: (0, 2), 2: (1,), 1: (3,)})
    staying = [replica(0, "c", formed=2), replica(1, "b", formed=1)]
    after = next_roster(generation=2, staying=staying, joining=[], total_lanes=4, before=before)
    assert after.lanes == {0: (0, 1), 1: (2, 3)}


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_every_lane_is_dealt_once(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 9))
    before = data.draw(st.integers(1, 5))
    dealt = data.draw(st.permutations(range(total)))
    lanes = {index: tuple(sorted(dealt[index::before])) for index in range(before)}
    kept = data.draw(st.sets(st.integers(0, before - 1), min_size=1))
    new = data.draw(st.sets(st.integers(0, 7))) - kept
    after = next_roster(
        generation=2,
        staying=[replica(i, f"s{i}", formed=i) for i in sorted(kept)],
        joining=[replica(i, f"j{i}", formed=10 + i) for i in sorted(new)],
        total_lanes=total,
        before=held(lanes) if data.draw(st.booleans()) else None,
    )
    assert after.lanes.keys() == kept | new == {r.index for r in after.replicas}
    assert sorted(lane for lanes in after.lanes.values() for lane in lanes) == list(range(total))


def test_sources_of_heals_take_turns() -> None:
    all_five = roster(*(replica(i, f"v{i}", f"w{i}", formed=i) for i in (3, 0, 4, 1, 2)))
    # Positions 0 to 4 hold the replicas 3, 0, 4, 1, 2; those at 1, 2 and 4 are new.
    new = {0: {"v0", "w0"}, 4: {"w4"}, 2: {"v2"}}
    assert plan_heals(all_five, new) == ((1, 0, (0, 1)), (2, 3, (1,)), (4, 0, (0,)))
    assert plan_heals(all_five, {}) == ()
    assert plan_heals(all_five, {i: {f"v{i}"} for i in range(5)}) == (), "nobody has state"
