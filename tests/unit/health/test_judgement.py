"""Readings of one thing, and the signs that they are. Numbers are ours; the limits that they are
held against are those of the sources that `judgement.py` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from health.judgement import WINDOW_S, find_overflow, judge
from health.reading import Kind, Reading
from health.verdict import Sign

EVERY_S = 5.0


def readings(kind: Kind, of: str, *values: dict[str, float], pids: tuple[int, ...] = ()) -> Any:
    return [
        Reading(kind=kind, of=of, at_s=EVERY_S * i, values=v, pids=pids)
        for i, v in enumerate(values)
    ]


def judged(*histories: Sequence[Reading]) -> list[Sign]:
    return judge({(h[0].kind, h[0].of): h for h in histories}, "n1", 7.0)


def names(*histories: Sequence[Reading]) -> set[str]:
    return {sign.name for sign in judged(*histories)}


# -- counters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "worst"),
    [
        ((0, 100), None),
        ((0, 101), 101),
        ((5_000_000, 5_000_050), None),  # of a machine that has counted for long
        ((0, 60, 105), None),  # 5 s have filled in 5 of the 60
        ((0, 60, 106), 46),
        ((0, 60, 106, 107), 46),  # what did not fit took nothing out
        ((0, 100, 200, 300), 100),
        ((900, 0, 100), None),  # reset, and no debt to the bucket
        ((900, 0, 101), 101),  # nor a credit
    ],
)
def test_a_bucket_of_100(counts: Sequence[float], worst: float | None) -> None:
    series = readings("efa", "rdma0 port 1", *({"rx_drops": float(c)} for c in counts))
    assert find_overflow(series, "rx_drops", 100) == worst


def test_a_counter_that_a_device_lacks_says_nothing() -> None:
    assert find_overflow(readings("efa", "rdma0", {}, {}), "rx_drops", 100) is None


def test_efa_counters_about_the_other_side_do_not_speak_against_this_one() -> None:
    counted = {"rx_drops": 0.0, "unresponsive_remote_events": 0.0, "retrans_pkts": 0.0}
    more = {"rx_drops": 500.0, "unresponsive_remote_events": 500.0, "retrans_pkts": 500.0}
    signs = judged(readings("efa", "rdma0 port 1", counted, more))
    assert {(s.name, s.role, s.cause, s.node) for s in signs} == {
        ("efa_rx_drops", "confirmation", "link", "n1"),
        ("efa_unresponsive_remote_events", "cascade", "link", "n1"),
    }


def test_an_interface() -> None:
    quiet = {"rx_dropped": 0.0, "carrier_down_count": 1.0}
    assert names(readings("nic", "eth0", quiet, quiet)) == set()
    assert names(readings("nic", "eth0", quiet, {**quiet, "carrier_down_count": 3.0})) == set()
    assert names(
        readings("nic", "eth0", quiet, {"rx_dropped": 1e6, "carrier_down_count": 4.0})
    ) == {
        "nic_rx_dropped",
        "link_flaps",
    }


# -- machines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read_only", "expected"),
    [
        ((0, 1), {("disk_lost", False)}),
        ((0, 1, 1), {("disk_lost", False)}),
        ((0, 1, 1, 1), {("disk_lost", True)}),
        ((0, 1, 0, 1, 1), {("disk_lost", False)}),
        ((0, 1, 1, 1, 0), set()),  # it was for a moment
        ((1, 1, 1, 1), set()),
        ((0, 0), set()),
    ],
)
def test_a_disk_that_stays_read_only_is_lost_and_one_that_was_before_is_not(
    read_only: Sequence[float], expected: set[tuple[str, bool]]
) -> None:
    signs = judged(readings("mount", "/", *({"read_only": float(one)} for one in read_only)))
    assert {(sign.name, sign.repeated) for sign in signs} == expected
    assert not any(sign.decisive for sign in signs)


@pytest.mark.parametrize(
    ("counts", "every_s", "gone", "expected"),
    [
        ((3, 3), 5.0, ("w1",), set()),  # counted before we came
        ((3, 4), 5.0, ("w1",), {("w1", "root")}),
        ((3, 4, 4, 4, 4, 4), 5.9, ("w1",), {("w1", "root")}),  # it gave its memory back slowly
        ((3, 4, 4, 4, 4, 4, 4, 4, 4), 5.0, ("w1",), set()),
        ((3, 4), 40.0, ("w1",), {("w1", "root")}),  # a look took long, as memory was short
        ((3, 4, 4), 40.0, ("w1",), set()),
        ((3, 5), 5.0, ("w1", "w2"), {("w1", "root"), ("w2", "root")}),
        ((3, 4), 5.0, (), {(None, "confirmation")}),  # another process
    ],
)
def test_processes_that_the_kernel_ended_for_their_memory(
    counts: Sequence[float],
    every_s: float,
    gone: Sequence[str],
    expected: set[tuple[str | None, str]],
) -> None:
    series = [
        Reading(kind="memory", of="/proc/vmstat", at_s=every_s * i, values={"oom_kills": float(c)})
        for i, c in enumerate(counts)
    ]
    signs = judge({("memory", "/proc/vmstat"): series}, "n1", 7.0, gone)
    assert {(sign.worker, sign.role) for sign in signs} == expected
    assert {(s.name, s.cause, s.source, s.node) for s in signs} <= {
        ("oom_killed", "out_of_memory", "reading", "n1")
    }


WELL = {
    "lost": 0.0,
    "ecc_uncorrected_volatile": 3.0,
    "remap_pending": 0.0,
    "remap_failed": 0.0,
    "recovery_action": 0.0,
    "throttle_reasons": 4.0,  # NVML: a power cap
}
SILENT = {"lost": 0.0, "unanswered": 1.0}


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ([WELL] * 200, set()),
        ([{"lost": 1.0}], {("gpu_lost", "root", "reboot", True, False)}),
        ([SILENT] * 3, {("unanswered", "root", "reboot", False, False)}),
        ([SILENT] * 2, set()),
        ([SILENT, SILENT, WELL, SILENT], set()),
        (
            [{**WELL, "remap_failed": 1.0}],
            {("remap_failed", "root", "replace_node", True, False)},
        ),
        (
            [{**WELL, "remap_failed": 1.0, "ecc_uncorrected_volatile": 0.0}],
            {("remap_failed", "root", "replace_node", True, False)},  # and no doctor lets it in
        ),
        (
            [{**WELL, "remap_pending": 1.0}],
            {("remap_pending", "confirmation", "reset_gpu", False, False)},
        ),
        (
            [{**WELL, "ecc_uncorrected_volatile": 4.0}],
            {("ecc_uncorrected", "root", "reset_gpu", False, False)},
        ),
        (
            [{**WELL, "ecc_uncorrected_volatile": e} for e in (4.0, 6.0)],
            {("ecc_uncorrected", "root", "reset_gpu", False, True)},
        ),
        (
            [{**WELL, "recovery_action": 1.0}] * 2,
            {("recovery_action", "root", "reset_gpu", False, False)},
        ),
        (
            [{**WELL, "recovery_action": 2.0}] * 3,
            {("recovery_action", "root", "reboot", False, True)},
        ),
        (
            [{**WELL, "recovery_action": 7.0}],  # of a driver later than our table
            {("recovery_action", "root", "reboot", False, False)},
        ),
        ([{**WELL, "recovery_action": 1.0}, WELL], set()),
        (
            [{**WELL, "throttle_reasons": 64.0}] * 120,
            {("throttled", "confirmation", None, False, False)},
        ),
        ([{**WELL, "throttle_reasons": 64.0}] * 60, set()),  # not for ten minutes yet
        (
            [{**WELL, "nvlink_errors": float(i)} for i in range(16)],  # 15 rises
            {("nvlink_errors", "confirmation", None, False, False)},
        ),
        ([{**WELL, "nvlink_errors": float(i)} for i in range(15)], set()),
        ([{**WELL, "nvlink_errors": float(i // 4)} for i in range(31)], set()),
        (
            [{**WELL, "nvlink_errors": float((i + 1) // 2)} for i in range(31)],  # 15 of 30
            {("nvlink_errors", "confirmation", None, False, False)},
        ),
        ([{**WELL, "nvlink_errors": float(min(i, 20))} for i in range(40)], set()),  # they ended
        (
            [{**WELL, "nvlink_recoveries": r} for r in (7.0, 8.0, 10.0, 28.0)],
            {("nvlink_recoveries", "confirmation", None, False, False)},
        ),
        ([{**WELL, "nvlink_recoveries": r} for r in (7.0, 25.0, 43.0)], set()),  # of 18 links each
    ],
)
def test_a_gpu(then: list[dict[str, float]], expected: set[tuple[Any, ...]]) -> None:
    signs = judged(readings("gpu", "0000:05:00", WELL, *then))
    assert {(s.name, s.role, s.remedy, s.decisive, s.repeated) for s in signs} == expected
    assert {(s.of, s.node) for s in signs} <= {("0000:05:00", "n1")}


def test_a_gpu_that_was_never_reached_explains_no_loss() -> None:
    """It may be so for as long as the agent is there."""
    (sign,) = judged(readings("gpu", "index 3", *[SILENT] * 3))
    assert (sign.name, sign.role) == ("unanswered", "confirmation")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([{"79": 1.0}], {("xid_79", "root", "reboot", False)}),
        ([{"48": 1.0}, {"48": 1.0}], {("xid_48", "root", "reset_gpu", True)}),
        ([{"48": 2.0}], {("xid_48", "root", "reset_gpu", False)}),  # once for each of its links
        ([{"13": 1.0}], {("xid_13", "confirmation", "new_process", False)}),
        ([{"45": 1.0}], {("xid_45", "cascade", None, False)}),
        ([{"144": 1.0}], {("xid_144", "confirmation", None, False)}),  # fatal or not: not told
        ([{"43": 1.0, "154": 1.0, "999": 1.0}], set()),
    ],
)
def test_xids_that_the_driver_tells(
    told: list[dict[str, float]], expected: set[tuple[Any, ...]]
) -> None:
    signs = judged(readings("xid", "0000:05:00", *told))
    assert {(s.name, s.role, s.remedy, s.repeated) for s in signs} == expected
    assert {(s.of, s.cause, s.source) for s in signs} <= {("0000:05:00", "gpu_error", "reading")}


# -- workers ---------------------------------------------------------------------------------------


def worker(
    count: int,
    *,
    cpu_share: float,
    phase: str = "works",
    marks: float = 0.0,
    in_kernel: float = 0.0,
    of: str = "w1",
    waiting: float = 0.0,
) -> list[Reading]:
    """A worker that enters `marks` phases between two readings, and waits in each n-th of them."""
    every = round(1 / waiting) if waiting else 0
    return [
        Reading(
            kind="worker",
            of=of,
            at_s=EVERY_S * i,
            pids=(7,),
            values={
                "cpu_s": cpu_share * EVERY_S * i,
                "marks": 50 + marks * i,
                "waits": float(phase == "waits" or (every > 0 and i % every == 0)),
                "works": float(phase == "works" and not (every > 0 and i % every == 0)),
                "in_kernel": in_kernel,
            },
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (worker(7, cpu_share=0.0), {"idle"}),
        (worker(7, cpu_share=0.0, phase="waits"), {"idle"}),
        (worker(7, cpu_share=1.0), {"busy"}),
        (worker(7, cpu_share=0.5), set()),
        (worker(6, cpu_share=0.0), set()),  # for 25 s only
        (worker(7, cpu_share=0.0, phase="parked"), set()),  # a spare
        (worker(7, cpu_share=0.0, marks=1), set()),  # it goes on
        (worker(7, cpu_share=0.0, in_kernel=1.0), {"idle", "in_kernel"}),
        (worker(60, cpu_share=1.0, marks=9, waiting=0.0), {"waits_little"}),
        (worker(60, cpu_share=1.0, marks=9, waiting=0.25), {"waits_much"}),
        (worker(60, cpu_share=1.0, marks=9, waiting=0.1), set()),
        (worker(59, cpu_share=1.0, marks=9), set()),
    ],
)
def test_a_worker(series: list[Reading], expected: set[str]) -> None:
    signs = judged(series)
    assert {sign.name for sign in signs} == expected
    assert {(sign.worker, sign.role) for sign in signs} <= {("w1", "confirmation")}


@pytest.mark.parametrize(
    ("stood", "waiting", "expected"),
    [
        (0.0, 0.05, {"waits_little"}),
        (0.0, 0.06, set()),
        (0.0, 0.15, set()),
        (0.25, 0.15, {"waits_much"}),
        (0.25, 0.13, set()),
        (0.25, 0.05, set()),
        (0.25, 0.0, {"waits_little"}),
    ],
)
def test_that_a_worker_waits_much_or_little_stands_until_the_share_is_between(
    stood: float, waiting: float, expected: set[str]
) -> None:
    """Each time that it comes is an event, and a share near a limit comes and goes for months."""
    before = judged(worker(60, cpu_share=1.0, marks=9, waiting=stood))
    now = worker(60, cpu_share=1.0, marks=9, waiting=waiting)
    signs = judge({("worker", "w1"): now}, "n1", 7.0, before=before)
    assert {sign.name for sign in signs} == expected
    others = [replace(sign, of="w2", worker="w2") for sign in before]
    assert judge({("worker", "w1"): now}, "n1", 7.0, before=others) == judged(now)


def test_what_a_worker_with_a_gpu_does_shows_there() -> None:
    still = worker(7, cpu_share=1.0)  # its thread spins while it waits
    gpu = readings("gpu", "0000:05:00", *[{"utilization_percent": 0.0}] * 7, pids=(7,))
    assert names(still, gpu) == {"idle"}
    other = readings("gpu", "0000:05:00", *[{"utilization_percent": 0.0}] * 7, pids=(8,))
    assert names(still, other) == {"busy"}


@pytest.mark.parametrize(
    ("before", "since", "expected"),
    [(0.0, 100.0, {"busy"}), (100.0, 0.0, {"idle"}), (0.0, 50.0, set())],
)
def test_what_its_gpu_did_since_a_worker_stands_still_counts(
    before: float, since: float, expected: set[str]
) -> None:
    values = [{"utilization_percent": percent} for percent in (before, *[since] * 6)]
    assert names(worker(7, cpu_share=0.0), readings("gpu", "g", *values, pids=(7,))) == expected


def test_a_worker_whose_gpu_is_not_known_is_neither_idle_nor_busy() -> None:
    """Those of other nodes are judged by their GPUs, and who waits alike must not differ."""
    gpu = readings("gpu", "0000:05:00", *[{"utilization_percent": 0.0}] * 7)
    assert names(worker(7, cpu_share=1.0), gpu) == set()
    assert names(worker(7, cpu_share=0.0, in_kernel=1.0), gpu) == {"in_kernel"}


def test_the_window_holds_enough_for_every_rule() -> None:
    assert WINDOW_S / EVERY_S >= 60
