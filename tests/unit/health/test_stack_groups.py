"""Workers by their stacks, as faulthandler wrote them in a run of 2 x 2 in which w3 looped."""

from __future__ import annotations

import pytest

from health.stack_groups import DEPTH, find_stack_groups, parse_stack
from tests.support import ROOT

HOME = "train_worker"
RECORDED = ROOT / "tests" / "data" / "stacks"
ACROSS, INSIDE, LOOPS = (
    (RECORDED / f"{name}.txt").read_text()
    for name in ("waits_across_replicas", "waits_inside", "loops")
)
SILENT = "it did not write its stacks within 0.25 s\nThreads, by the kernel:\n  4108 ray: T 0\n"
MET = {
    "replica/1": ("w0", "w1"),
    "replica/2": ("w2", "w3"),
    "cross/1/0": ("w0", "w2"),
    "cross/1/1": ("w1", "w3"),
}


def test_the_dominant_group_is_healthy_and_the_outliers_share_a_replica() -> None:
    found = find_stack_groups({"w3": LOOPS, "w2": INSIDE, "w0": ACROSS, "w1": ACROSS}, HOME, MET)
    assert [group.workers for group in found.groups] == [("w0", "w1"), ("w3",), ("w2",)]
    assert (found.outliers, found.in_common, found.unread) == (("w3", "w2"), "replica/2", ())
    assert found.groups[1].stack[0] == "worker/fault_injection.py _fire"


@pytest.mark.parametrize(
    ("stacks", "outliers", "in_common"),
    [
        pytest.param(
            {"w0": ACROSS, "w1": LOOPS, "w2": ACROSS, "w3": LOOPS, "w4": ACROSS},
            ("w1", "w3"),
            "cross/1/1",
            id="a position in all replicas",
        ),
        pytest.param(
            {"w0": ACROSS, "w1": LOOPS, "w2": LOOPS, "w4": ACROSS, "w5": ACROSS},
            ("w1", "w2"),
            None,
            id="nothing",
        ),
        pytest.param(
            {"w0": ACROSS, "w1": ACROSS, "w3": LOOPS}, ("w3",), None, id="one names itself"
        ),
        pytest.param(
            {"w0": ACROSS, "w1": ACROSS, "w2": LOOPS, "w3": LOOPS}, (), None, id="as many"
        ),
        pytest.param({"w0": ACROSS, "w1": ACROSS}, (), None, id="all do the same"),
        pytest.param({}, (), None, id="nobody was asked"),
    ],
)
def test_what_outliers_have_in_common(
    stacks: dict[str, str], outliers: tuple[str, ...], in_common: str | None
) -> None:
    found = find_stack_groups(stacks, HOME, MET)
    assert (found.outliers, found.in_common) == (outliers, in_common)


def test_what_all_who_were_asked_share_says_nothing() -> None:
    """A run of one replica: it has all of them."""
    stacks = {"w0": ACROSS, "w1": ACROSS, "w4": ACROSS, "w2": INSIDE, "w3": LOOPS}
    assert find_stack_groups(stacks, HOME, {"replica/1": tuple(stacks)}).in_common is None


def test_who_does_not_answer_makes_no_group() -> None:
    """On a busy machine these may be most."""
    stacks = {"w0": SILENT, "w1": SILENT, "w2": SILENT, "w3": LOOPS}
    found = find_stack_groups(stacks, HOME, MET)
    assert [group.workers for group in found.groups] == [("w3",)]
    assert (found.outliers, found.unread) == ((), ("w0", "w1", "w2"))


def test_the_innermost_calls_of_the_thread_that_trains_count() -> None:
    assert parse_stack(ACROSS, HOME) == (
        "backend/polling.py poll_until",
        "replication/replicas.py poll",
        "replication/reduction.py finish",
        "loop/steps.py try_step",
        "loop/steps.py run_steps",
        "loop/steps.py run",
        "worker/worker.py train",
        "worker/worker.py follow",
    )
    inside = parse_stack(INSIDE, HOME)
    assert inside[0] == "distributed/distributed_c10d.py all_gather_single"
    assert len(inside) == DEPTH
    assert parse_stack(INSIDE, "no_such_function") == ()


def test_of_two_looks_the_second_counts_where_it_was_answered() -> None:
    assert parse_stack(f"{INSIDE}\nLater:\n\n{LOOPS}", HOME) == parse_stack(LOOPS, HOME)
    assert parse_stack(f"{INSIDE}\nLater:\n\n{SILENT}", HOME) == parse_stack(INSIDE, HOME)


def test_another_line_of_the_same_function_is_the_same_place() -> None:
    assert parse_stack(LOOPS.replace("line 62", "line 63"), HOME) == parse_stack(LOOPS, HOME)
