"""From what machines answer to what is said of them: who was busy is not bad."""

from __future__ import annotations

from elastic.doctor.pairs import Measured, judge_pairs
from elastic.driver.examine_cluster import measure
from elastic.ray_compat.cluster import Failed

BUSY = Failed(why="no answer in 150 s")
WELL = (1e10, "")


def test_a_machine_whose_gpus_were_in_use_is_not_to_be_replaced() -> None:
    waits = (0.0, "no answer in 120 s")
    measured = [
        *measure([("a", "busy"), ("b", "c")], {"a": waits, "busy": BUSY, "b": WELL, "c": WELL}),
        *measure([("a", "b")], {"a": WELL, "b": WELL}),
    ]
    assert [one.pair for one in measured] == [("b", "c"), ("a", "b")]
    assert {one.severity for one in judge_pairs(measured)} == {"OK"}


def test_a_pair_is_as_fast_as_its_slower_machine_and_fails_with_either() -> None:
    answers = {"a": (2e9, ""), "b": (1e9, ""), "c": (0.0, "3 wrong sums"), "d": WELL}
    assert measure([("a", "b"), ("c", "d")], answers) == [
        Measured(pair=("a", "b"), bytes_per_s=1e9),
        Measured(pair=("c", "d"), trouble="3 wrong sums"),
    ]
