"""Tables of connections that failed, and whom they take out."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.membership.links import (
    FailedLink,
    between_two,
    describe,
    find_culprits,
    find_failed,
    plan_removals,
)
from elastic.protocol.messages import LinkTest
from elastic.protocol.roster import Remnant, Replica, Roster


def roster(*replicas: str, lacking: int = 0, remnant: str = "") -> Roster:
    """Replicas by their workers, of which the last `lacking` have no state, and one remnant, with
    `-` for who is lost."""
    whole = tuple(
        Replica(index=index, formed=index + 1, workers=tuple(workers.split()))
        for index, workers in enumerate(replicas)
    )
    left = {rank: worker for rank, worker in enumerate(remnant.split()) if worker != "-"}
    return Roster(
        generation=4,
        replicas=whole,
        lanes={r.index: (r.index,) if r.index < len(whole) - lacking else () for r in whole},
        remnants=(Remnant(index=9, formed=9, workers=left),) if left else (),
    )


def links(*pairs: str) -> list[FailedLink]:
    """`a b`: what a has sent has not come to b."""
    ends = (pair.split() for pair in pairs)
    return [FailedLink(sender, receiver, "nothing") for sender, receiver in ends]


def on(*nodes: str) -> dict[str, str]:
    """Worker -> node; one row for each node: `N: a b`."""
    rows = [row.split(":") for row in nodes]
    return {worker: node for node, workers in rows for worker in workers.split()}


APART = on("A: a", "B: b", "C: c", "D: d")


@pytest.mark.parametrize(
    ("failed", "replicas", "nodes", "expected"),
    [
        # None failed: nobody is blamed.
        ((), ("a", "b", "c"), APART, ""),
        # One with all others, both ways or one.
        (("b a", "a b", "b c", "c b"), ("a", "b", "c"), APART, "b"),
        (("a b", "a c"), ("a", "b", "c"), APART, "a"),
        # One pair: the one of the higher position goes, not the lead.
        (("a b",), ("a", "b", "c"), APART, "b"),
        (("c b", "b c"), ("a", "b", "c"), APART, "c"),
        (("a b",), ("a", "b"), on("Z: a", "B: b"), "b"),
        # Two pairs with nobody in common.
        (("a b", "c d"), ("a", "b", "c", "d"), APART, "b d"),
        # A whole node, with workers of two replicas; the others are each on their own.
        (
            ("a c", "a d", "b c", "b d"),
            ("a", "b", "c", "d"),
            on("N: a b", "C: c", "D: d"),
            "a b",
        ),
        # Between two nodes: fewer replicas break with N.
        (("a b", "a c"), ("a", "b", "c"), on("N: a", "M: b c"), "a"),
        (("a c", "b c"), ("a", "b", "c"), on("N: a b", "M: c"), "c"),
        # Two replicas, each on two nodes: only one of them breaks.
        (
            ("a c", "b d"),
            ("a b", "c d"),
            on("A: a", "B: b", "C: c", "D: d"),
            "c d",
        ),
        # What is broken breaks no more.
        (
            ("a c", "a e", "b f"),
            ("a b", "c d", "e f"),
            on("A: a", "B: b", "C: c", "D: d", "E: e", "F: f"),
            "a b",
        ),
        # One worker of a replica on two nodes: the other stays.
        (("a c", "c a", "a e"), ("a b", "c d", "e f"), on("A: a", "B: b", "C: c d e f"), "a"),
        # Inside a machine.
        (("a b",), ("a", "b"), on("N: a b"), ""),
    ],
)
def test_those_in_common_go(
    failed: tuple[str, ...], replicas: tuple[str, ...], nodes: dict[str, str], expected: str
) -> None:
    assert find_culprits(links(*failed), roster(*replicas), nodes) == set(expected.split())


def test_a_follower_goes_before_a_whole_replica() -> None:
    there = roster("a b", "c d", remnant="e -")
    nodes = on("A: a", "B: b", "C: c", "D: d", "E: e")
    assert find_culprits(links("c e"), there, nodes) == {"e"}


def test_who_is_not_in_the_roster_goes_before_a_follower() -> None:
    there = roster("c d", remnant="e -")
    assert find_culprits(links("n e"), there, on("C: c", "D: d", "E: e", "B: n")) == {"n"}
    assert find_culprits(links("a b", "a c"), roster(), APART) == {"a"}


@pytest.mark.parametrize(
    ("failed", "nodes", "expected"),
    [
        (("a b", "b a"), APART, "b"),
        (("a c", "b c"), on("N: a b", "M: c"), "c"),  # two replicas of one machine
        (("a b", "a c"), APART, ""),
        (("a b", "c d"), APART, "b d"),
        # What another culprit explains speaks against nobody else.
        (("a b", "a c", "a d", "b c"), APART, "c"),
        (("a b",), on("N: a b"), ""),
    ],
)
def test_where_either_end_explains_all_it_is_told_from_a_machine_that_fails_with_several(
    failed: tuple[str, ...], nodes: dict[str, str], expected: str
) -> None:
    there = links(*failed)
    culprits = find_culprits(there, roster("a", "b", "c", "d"), nodes)
    assert between_two(culprits, there, nodes) == set(expected.split())


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20),
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_without_them_no_failed_connection_is_left(
    pairs: list[tuple[int, int]], places: list[int]
) -> None:
    there = roster(*(f"w{number}" for number in range(8)))
    nodes = {f"w{number}": f"n{place}" for number, place in enumerate(places)}
    failed = [FailedLink(f"w{a}", f"w{b}", "nothing") for a, b in pairs]
    culprits = find_culprits(failed, there, nodes)
    between = [link for link in failed if nodes[link.sender] != nodes[link.receiver]]
    assert all({link.sender, link.receiver} & culprits for link in between)
    assert culprits <= {end for link in between for end in link[:2]}


@pytest.mark.parametrize(
    ("least", "idle", "expected"),
    [
        (1, "", "b"),
        (2, "", ""),  # one replica would be left
        (2, "s", "b"),  # a spare takes its place,
        (2, "t", ""),  # but not on the same machine
    ],
)
def test_never_below_the_minimum(least: int, idle: str, expected: str) -> None:
    there, nodes = roster("a", "b"), on("A: a", "B: b t", "S: s")
    gone = plan_removals(links("a b"), there, nodes, idle=idle.split(), least=least)
    assert gone == set(expected.split())


@pytest.mark.parametrize(("idle", "expected"), [("", ""), ("s", "c")])
def test_survivors_and_a_spare_are_a_replica(idle: str, expected: str) -> None:
    there = roster("a b", "c d")
    nodes = on("A: a b", "C: c", "D: d", "S: s")
    gone = plan_removals(links("a c"), there, nodes, idle=idle.split(), least=2)
    assert gone == set(expected.split())


def test_never_the_last_that_has_state() -> None:
    there = roster("a", "b", "c", lacking=2)
    assert plan_removals(links("a b", "a c"), there, APART, idle=(), least=1) == set()
    assert plan_removals(links("a b"), there, APART, idle=(), least=1) == {"b"}


def test_state_counts_for_nothing_where_it_would_be_lost_otherwise() -> None:
    there, nodes = roster("a b"), on("A: a", "B: b", "S: s")
    for idle, lost, expected in (("s", "", ""), ("s", "a b", "b"), ("", "a b", "")):
        gone = plan_removals(
            links("a b"), there, nodes, idle=idle.split(), least=1, lost_anyway=lost.split()
        )
        assert gone == set(expected.split())


@pytest.mark.parametrize(("lost", "expected"), [("b", "a"), ("c", ""), ("", "")])
def test_only_the_replicas_that_are_lost_anyway_excuse_it(lost: str, expected: str) -> None:
    there, nodes = roster("a b", "c d", lacking=1), on("A: a", "B: b", "C: c", "D: d")
    gone = plan_removals(
        links("a c", "a d"), there, nodes, idle=(), least=1, lost_anyway=lost.split()
    )
    assert gone == set(expected.split())


def test_what_workers_have_found_is_put_together() -> None:
    there = roster("a b", "c d", remnant="- e")

    def found(short: dict[int, int]) -> LinkTest:
        return LinkTest(generation=4, short=short, of_bytes=1000, bound_s=10.0)

    tests = {"a": {}, "b": {2: 0}, "c": {0: 64}, "d": {}, "e": {1: 7}}
    failed = find_failed(there, {worker: found(short) for worker, short in tests.items()})
    assert failed == [
        FailedLink("a", "c", "64 of 1,000 bytes in 10 s"),
        FailedLink("e", "b", "0 of 1,000 bytes in 10 s"),
        FailedLink("d", "e", "7 of 1,000 bytes in 10 s"),
    ]
    nodes = on("A: a b", "C: c d", "E: e")
    assert describe(failed[:1], nodes) == "a (node A) to c (node C): 64 of 1,000 bytes in 10 s"
    assert describe(failed * 2, nodes).endswith(", and 2 more")


def test_where_everything_fails_it_is_decided_at_once() -> None:
    """The coordinator does nothing else meanwhile."""
    workers = [f"w{number}" for number in range(256)]
    failed = [FailedLink(a, b, "nothing") for a in workers for b in workers if a != b]
    nodes = {worker: f"n{number // 2}" for number, worker in enumerate(workers)}
    began = time.process_time()
    culprits = find_culprits(failed, roster(*workers), nodes)
    assert len(culprits) == len(workers) - 2
    assert time.process_time() - began < 10
