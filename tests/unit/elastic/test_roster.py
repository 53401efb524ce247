from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.roster import Replica, Roster, next_roster, plan_formations, plan_heals


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


def test_neighbours_in_the_pool_form_the_free_replicas() -> None:
    formed = plan_formations(
        pool=["a", "b", "c", "d", "e"],
        taken={1},
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
        pool=pool, taken=taken, max_replicas=2, workers_per_replica=2, next_number=1
    )


def test_without_an_interrupted_step_lanes_are_dealt_anew() -> None:
    after = next_roster(
        generation=5,
        staying=[replica(0, "a"), replica(2, "c")],
        joining=[replica(1, "b", formed=4)],
        total_lanes=6,
        lanes_before=None,
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
        lanes_before=None,
    )
    assert [r.index for r in after.replicas] == [0, 1]
    assert after.lanes == {0: (0, 1), 1: (2, 3)}


def test_after_a_fault_only_the_lost_lanes_move() -> None:
    after = next_roster(
        generation=2,
        staying=[replica(1, "b"), replica(2, "c")],
        joining=[],
        total_lanes=4,
        lanes_before={0: (0,), 1: (1, 3), 2: (2,)},
    )
    assert after.lanes == {1: (1, 3), 2: (0, 2)}


def test_a_new_replica_inherits_no_lanes_of_its_index() -> None:
    after = next_roster(
        generation=2,
        staying=[replica(1, "b")],
        joining=[replica(0, "x", formed=3)],
        total_lanes=2,
        lanes_before={0: (0,), 1: (1,)},
    )
    assert after.lanes == {0: (), 1: (0, 1)}


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_every_lane_is_dealt_once(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 9))
    before = data.draw(st.integers(1, 5))
    dealt = data.draw(st.permutations(range(total)))
    held = {index: tuple(sorted(dealt[index::before])) for index in range(before)}
    kept = data.draw(st.sets(st.integers(0, before - 1), min_size=1))
    new = data.draw(st.sets(st.integers(0, 7))) - kept
    after = next_roster(
        generation=2,
        staying=[replica(i, f"s{i}") for i in sorted(kept)],
        joining=[replica(i, f"j{i}") for i in sorted(new)],
        total_lanes=total,
        lanes_before=held if data.draw(st.booleans()) else None,
    )
    assert after.lanes.keys() == kept | new == {r.index for r in after.replicas}
    assert sorted(lane for lanes in after.lanes.values() for lane in lanes) == list(range(total))


def test_sources_of_heals_take_turns() -> None:
    all_five = roster(*(replica(i, f"w{i}") for i in (3, 0, 4, 1, 2)))
    # Positions 0 to 4 hold the replicas 3, 0, 4, 1, 2; those at 1, 2 and 4 are new.
    assert plan_heals(all_five, {0, 4, 2}) == ((1, 0), (2, 3), (4, 0))
    assert plan_heals(all_five, set()) == ()
    assert plan_heals(all_five, {0, 1, 2, 3, 4}) == (), "nobody has state"
