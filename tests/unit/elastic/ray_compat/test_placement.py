from __future__ import annotations

import itertools
import math
from dataclasses import replace
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
    decide_start,
    plan_group_sizes,
    plan_placement,
)

WANTED = Wanted(replicas=2, workers_per_replica=4, spares=1)
ALL = {0, 1, 2, 3}


def group(name: str, size: int = 4, nodes: str = "", **facts: Any) -> GroupView:
    """`nodes`: a letter for each of its bundles."""
    bundles = {key: frozenset(facts.pop(key, ())) for key in ("living", "starting", "draining")}
    state, known = facts.pop("state", "placed"), dict(enumerate(nodes))
    return GroupView(name=name, size=len(nodes) or size, state=state, nodes=known, **bundles)


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


TOGETHER = replace(WANTED, together=4)
"""Of nodes A, B, ... with room for at most 8 of these."""


def living(name: str, nodes: str) -> GroupView:
    return group(name, nodes=nodes, living=range(len(nodes)))


def test_workers_on_pieces_of_nodes_are_spares_and_whole_nodes_are_asked_for() -> None:
    """They would be counted as a replica otherwise, and be idle for ever."""
    started = living("a", "AAAA"), living("b", "BBBC")
    assert plan_placement(TOGETHER, started, 8) == PlacementPlan(
        give_up=(), ask=(4,), on_one_node=True, fill=()
    )
    asked = group("new", state="pending")
    assert plan_placement(TOGETHER, [*started, asked], 8).ask == ()
    here = living("new", "DDDD")
    assert plan_placement(TOGETHER, [*started, here], 8).ask == (), "the others do as spares"
    several = replace(TOGETHER, spares=5)
    assert plan_placement(several, started, 8).ask == (4, 1)
    assert plan_placement(several, started, 8).on_one_node is False, "there may be room for it"
    assert plan_placement(replace(TOGETHER, min_replicas=2), started, 8).ask == (1,)
    assert plan_placement(WANTED, started, 8).ask == (1,)
    none_holds_one = living("a", "AABB"), living("b", "CCCD")
    assert plan_placement(TOGETHER, none_holds_one, 8).ask == (1,)


def test_pieces_of_several_groups_on_a_node_are_whole_together() -> None:
    assert plan_placement(TOGETHER, [living("a", "AAAB"), living("b", "BBBA")], 8).ask == (1,)


def test_a_group_that_is_placed_on_pieces_of_nodes_is_given_back_before_anyone_starts_there() -> (
    None
):
    first = living("a", "AAAA")
    packed = group("b", nodes="BBCC")
    assert plan_placement(TOGETHER, [first, packed], 8) == PlacementPlan(
        give_up=("b",), ask=(4, 1), on_one_node=True, fill=()
    )
    begun = group("b", nodes="BBCC", starting={0, 1, 2, 3})
    assert plan_placement(TOGETHER, [first, begun], 8).give_up == ()
    needed = replace(TOGETHER, min_replicas=2)
    assert len(plan_placement(needed, [first, packed], 8).fill) == 4
    completing = group("b", nodes="BBBA"), living("a", "AAAB")
    assert len(plan_placement(TOGETHER, completing, 8).fill) == 4
    spare = group("s", nodes="A")
    assert plan_placement(TOGETHER, [first, spare], 8).fill == (("s", 0),)
    assert plan_placement(TOGETHER, [first, spare, packed], 8).give_up == ("b",)


def test_each_piece_of_a_replica_on_several_nodes_is_asked_for_by_itself() -> None:
    wanted = Wanted(replicas=2, workers_per_replica=8, spares=0, together=4)
    there = living("a", "AAAABBBB"), living("b", "CCDDEEEF")
    assert plan_placement(wanted, there, 8).ask == (4, 4)
    half = living("b", "CCCCDEEF")
    assert plan_placement(wanted, [there[0], half], 8).ask == (4,)


def views(places: st.SearchStrategy[str]) -> st.SearchStrategy[list[GroupView]]:
    return st.lists(
        st.builds(
            lambda n, state, nodes, *bundles: group(
                str(n),
                state=state,
                nodes=nodes if state == "placed" else "",
                living=bundles[0],
                starting=bundles[1],
                draining=bundles[2],
            ),
            st.uuids(),
            st.sampled_from(["pending", "placed", "lost"]),
            places,
            *[st.sets(st.integers(0, 3))] * 3,
        ),
        max_size=4,
    )


@given(groups=views(st.just("")), most=st.integers(0, 3))
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


@given(
    groups=views(st.text("ABC", min_size=4, max_size=4)),
    together=st.sampled_from([2, 4]),
    least=st.integers(1, 2),
)
def test_whatever_pieces_there_are_nothing_is_asked_for_again_and_again(
    groups: list[GroupView], together: int, least: int
) -> None:
    """Though Ray finds a node of its own for a group only where it has to."""
    wanted = replace(WANTED, together=together, min_replicas=least)
    nodes = map(chr, itertools.count(ord("a")))
    for turn in range(8):
        plan = plan_placement(wanted, groups, 8)
        there = [
            replace(
                view, living=view.living | {seat for name, seat in plan.fill if name == view.name}
            )
            for view in groups
            if view.name not in plan.give_up
        ]
        asked = [
            group(f"{turn}/{i}", nodes=next(nodes) * size)
            if plan.on_one_node
            else group(f"{turn}/{i}", nodes="".join(itertools.islice(nodes, size)))
            for i, size in enumerate(plan.ask)
        ]
        groups = [*there, *asked]
    assert (plan.ask, plan.give_up) == ((), ())


@pytest.mark.parametrize(
    ("placed", "whole", "since_s", "left_s", "decision"),
    [
        (8, True, 0.0, 60.0, "start"),
        (8, True, 0.0, -1.0, "start"),
        (8, False, 4.9, 60.0, "wait"),  # more may come
        (8, False, 4.9, -1.0, "wait"),
        (4, False, 5.0, 60.0, "start"),  # Ray may count a machine that is gone
        (3, False, 4.9, 60.0, "wait"),
        (3, False, 5.0, 60.0, "give_back"),  # another run may need just that
        (0, False, 50.0, 0.1, "wait"),  # nobody lacks it
        (0, False, 50.0, 0.0, "give_up"),
        (3, False, 1.0, 0.0, "give_up"),
    ],
)
def test_a_start_takes_the_least_or_waits_without_it(
    placed: int, whole: bool, since_s: float, left_s: float, decision: str
) -> None:
    decided = decide_start(placed=placed, least=4, whole=whole, since_s=since_s, left_s=left_s)
    assert decided == decision


@pytest.mark.parametrize("on_pieces", [True, False], ids=["one trains on pieces", "nobody works"])
def test_a_group_whole_on_its_node_is_kept(on_pieces: bool) -> None:
    """Also where that makes no replica more, as beside the least one that may lie on pieces."""
    wanted = Wanted(replicas=2, workers_per_replica=2, spares=0, together=2)
    pieces = group("p", nodes="ab", living={0, 1} if on_pieces else ())
    decided = plan_placement(wanted, [pieces, group("q", nodes="aa")], 8)
    assert "q" not in decided.give_up
    assert {("q", 0), ("q", 1)} <= set(decided.fill)


def test_what_never_starts_beside_a_worker_is_none_of_its_failures() -> None:
    """A machine fails for days; then the worker that trains is lost for once."""
    starts = FutileStarts()
    starts.count(hellos=1, newest=1, launches=2)
    for launch in range(3, 20):
        starts.count(hellos=1, newest=math.inf, launches=launch)
    starts.count(hellos=1, newest=1, launches=20, heard=True)
    starts.count(hellos=1, newest=math.inf, launches=21)
    assert starts.in_a_row == 1


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


@pytest.mark.parametrize("there_s", [3.0, None])
@pytest.mark.parametrize("imports_s", [0.0, 100.0])
def test_a_seat_whose_workers_end_early_is_tried_ever_more_rarely(
    there_s: float | None, imports_s: float
) -> None:
    """Soon after their hello, or before it, however long their imports take."""
    pauses, seat, now_s = Pauses(), ("g", 0), 1000.0
    waited = []
    for _ in range(9):
        now_s += imports_s + (there_s or 0.0)
        pauses.ended(seat, now_s, there_s=there_s)
        ready_s = next(now_s + s for s in range(100) if pauses.over(seat, now_s + s))
        waited.append(ready_s - now_s)
        assert pauses.over(("g", 1), now_s)
        now_s = ready_s
    assert waited == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    pauses.ended(seat, now_s, there_s=3600.0)
    assert pauses.over(seat, now_s)
