"""What machines do in pairs, and from what they answer to what is said of them: who was busy is not
bad."""

from __future__ import annotations

from elastic.doctor.pairs import Measured, judge_pairs
from elastic.driver.examine_cluster import measure, plan_devices, plan_parts
from elastic.ray_compat.cluster import Failed

BUSY = Failed(why="no answer in 150 s")
WELL = (1e10, "", 0)


def test_a_machine_whose_gpus_were_in_use_is_not_to_be_replaced() -> None:
    waits = (0.0, "no answer in 120 s", 0)
    measured = [
        *measure([("a", "busy"), ("b", "c")], {"a": waits, "busy": BUSY, "b": WELL, "c": WELL}),
        *measure([("a", "b")], {"a": WELL, "b": WELL}),
    ]
    assert [one.pair for one in measured] == [("b", "c"), ("a", "b")]
    assert {one.severity for one in judge_pairs(measured)} == {"OK"}


def test_a_pair_is_as_fast_as_its_slower_machine_and_fails_with_either() -> None:
    answers = {"a": (2e9, "", 0), "b": (1e9, "", 0), "c": (0.0, "lost", 0), "d": WELL}
    assert measure([("a", "b"), ("c", "d")], answers) == [
        Measured(pair=("a", "b"), bytes_per_s=1e9),
        Measured(pair=("c", "d"), trouble="lost"),
    ]


def test_wrong_sums_are_neither_slowness_nor_a_failure() -> None:
    answers = {"a": (2e9, "", 3), "b": (1e9, "", 1), "c": (0.0, "lost", 2), "d": WELL}
    assert measure([("a", "b"), ("c", "d")], answers) == [
        Measured(pair=("a", "b"), bytes_per_s=1e9, wrong=4),
        Measured(pair=("c", "d"), trouble="lost", wrong=2),
    ]


EIGHT = [f"cuda:{number}" for number in range(8)]


def test_no_gpu_takes_part_that_ray_has_not() -> None:
    """`ray start --num-gpus` may be below what the machine has, and NVML tells of all."""
    gpus = {"whole": 8.0, "half": 4.0, "none": 0.0, "head": 0.0}
    found = {"whole": EIGHT, "half": EIGHT, "none": EIGHT, "head": ["cpu"]}
    devices = plan_devices(found, gpus)
    assert devices == {"whole": EIGHT, "half": EIGHT[:4]}
    assert plan_parts([("whole", "half")], devices, "tcp:host:1/0") == {
        "whole": ("tcp:host:1/0/0", EIGHT[:4], 0, 8),
        "half": ("tcp:host:1/0/0", EIGHT[:4], 4, 8),
    }


def test_where_ray_has_no_gpu_the_cpus_take_part() -> None:
    devices = plan_devices({"a": EIGHT, "b": ["cpu"]}, {"a": 0.0, "b": 0.0})
    assert devices == {"a": ["cpu"], "b": ["cpu"]}
    parts = plan_parts([("a", "b")], devices, "tcp:host:1/0")
    assert parts["b"] == ("tcp:host:1/0/0", ["cpu"], 1, 2)
