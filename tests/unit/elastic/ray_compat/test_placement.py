from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.ray_compat.placement import (
    FutileStarts,
    GroupView,
    Pauses,
    PlacementPlan,
    Wanted,
    plan_group_sizes,
    plan_placement,
)

WANTED = Wanted(replicas=2, workers_per_replica=4, spares=1)
ALL = {0, 1, 2, 3}


def group(name: str, size: int = 4, **facts: Any) -> GroupView:
    bundles = {key: frozenset(facts.pop(key, ())) for key in ("living", "starting", "draining")}
    return GroupView(name=name, size=size, state=facts.pop("state", "placed"), **bundles)


def plan(*groups: GroupView, most: int = 8) -> PlacementPlan:
    return plan_placement(WANTED, groups, most)


def test_nothing_to_do_when_all_are_there() -> None:
    done = plan(group("a", living=ALL), group("b", living=ALL), group("c", 1, living={0}))
    assert done == PlacementPlan(give_up=(), ask=(), fill=())


@pytest.mark.parametrize(
    ("have", "most", "sizes"),
    [
        (0, 8, (4, 4, 1)),
        (5, 8, (3, 1)),  # the fifth is a spare so far; with three more there are two replicas
        (8, 8, (1,)),
        (9, 8, ()),
        (12, 8, ()),
        (0, 1, (4,)),
        (0, 0, ()),
        (0, -1, ()),
    ],
)
def test_replicas_are_completed_before_spares(have: int, most: int, sizes: tuple[int, ...]) -> None:
    assert plan_group_sizes(WANTED, have, most) == sizes


def test_an_ended_worker_is_replaced_in_its_seat_and_one_that_starts_is_left_alone() -> None:
    others = group("b", living=ALL), group("c", 1, living={0})
    assert plan(group("a", living={0}, starting={2}), *others) == PlacementPlan(
        give_up=(), ask=(), fill=(("a", 1), ("a", 3))
    )


def test_a_group_whose_machine_is_gone_is_given_up_and_asked_for_anew() -> None:
    others = group("b", living=ALL), group("c", 1, living={0})
    gone = group("a", state="lost", starting={0})  # what starts there never will
    assert plan(gone, *others) == PlacementPlan(give_up=("a",), ask=(3, 1), fill=())


def test_survivors_keep_their_group_and_ray_finds_places_for_its_other_bundles() -> None:
    others = group("b", living=ALL), group("c", 1, living={0})
    broken = group("a", state="lost", living={0, 1})
    assert plan(broken, *others) == PlacementPlan(give_up=(), ask=(), fill=())


def test_pending_groups_count_and_are_bounded() -> None:
    asked = group("a", state="pending")
    assert plan(asked).ask == (4, 1)
    assert plan(asked, most=1).ask == ()
    assert plan(asked).fill == ()


def test_successors_of_draining_workers_are_asked_for_before_they_are_gone() -> None:
    others = group("b", living=ALL), group("c", 1, living={0})
    leaving = group("a", living=ALL, draining=ALL)
    assert plan(leaving, *others) == PlacementPlan(give_up=(), ask=(3, 1), fill=())
    emptied = group("a", draining=ALL)
    assert plan(emptied, *others) == PlacementPlan(give_up=("a",), ask=(3, 1), fill=())
    half = group("a", living={0, 1}, draining={2, 3})
    assert plan(half, *others) == PlacementPlan(give_up=(), ask=(1, 1), fill=())


VIEWS = st.lists(
    st.builds(
        lambda n, state, *bundles: group(
            str(n), state=state, living=bundles[0], starting=bundles[1], draining=bundles[2]
        ),
        st.uuids(),
        st.sampled_from(["pending", "placed", "lost"]),
        *[st.sets(st.integers(0, 3))] * 3,
    ),
    max_size=4,
)


@given(groups=VIEWS, most=st.integers(0, 3))
def test_carrying_out_a_plan_leaves_nothing_to_ask_but_what_the_bound_withholds(
    groups: list[GroupView], most: int
) -> None:
    first = plan_placement(WANTED, groups, most)
    asked = [group(f"new{i}", size, state="pending") for i, size in enumerate(first.ask)]
    kept = [view for view in groups if view.name not in first.give_up]
    assert plan_placement(WANTED, [*kept, *asked], most).ask == ()
    waiting = sum(view.state != "placed" for view in kept)
    assert len(asked) <= max(0, most - waiting)
    have = sum(view.size - len(view.draining) for view in [*kept, *asked])
    assert have >= WANTED.workers or waiting + len(asked) >= most


def test_workers_that_never_get_going_are_counted_and_others_are_not() -> None:
    starts = FutileStarts()
    starts.count(hellos=0, newest=2, launches=2)
    starts.count(hellos=0, newest=math.inf, launches=3)
    assert starts.in_a_row == 2
    starts.count(hellos=4, newest=5, launches=6)  # somebody has started: all up to 6 may have
    assert starts.in_a_row == 0
    for newest in (1, 2, 6, 3):  # machines lost one after the other; no one comes in between
        starts.count(hellos=4, newest=newest, launches=8)
    assert starts.in_a_row == 0
    starts.count(hellos=4, newest=7, launches=8)
    starts.count(hellos=4, newest=8, launches=9)
    assert starts.in_a_row == 2


def test_a_seat_whose_workers_end_early_is_tried_ever_more_rarely() -> None:
    pauses, seat, now_s = Pauses(), ("g", 0), 1000.0
    waited = []
    for _ in range(9):
        pauses.begun(seat, now_s - 3.0)
        pauses.ended(seat, now_s)
        ready_s = next(now_s + s for s in range(100) if pauses.over(seat, now_s + s))
        waited.append(ready_s - now_s)
        assert pauses.over(("g", 1), now_s)
        now_s = ready_s + 3.0
    assert waited == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    pauses.begun(seat, now_s - 3600.0)
    pauses.ended(seat, now_s)
    assert pauses.over(seat, now_s)
