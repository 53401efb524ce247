"""A worker's CPUs are those beside its GPU; sysfs is a tree of real files, the threads are real."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.aws_machine import write
from trainer.backend.near_gpu import cpus_near, parse_cpus, plan_affinity, stay_near

T = TypeVar("T")
UUID = "370ec676-e407-3115-836a-8ebcb3c4f62a"
ALL = set(range(96))
FIRST = {*range(24), *range(48, 72)}  # the first socket of a p4d


@pytest.mark.parametrize(
    ("allowed", "near", "chosen"),
    [
        (ALL, FIRST, FIRST),
        (ALL, ALL, None),  # one socket
        (ALL, set(), None),  # the machine does not tell
        (ALL - {5}, FIRST, None),  # somebody has chosen
        ({0, 1}, FIRST, None),
    ],
)
def test_the_plan(allowed: set[int], near: set[int], chosen: set[int] | None) -> None:
    assert plan_affinity(allowed, ALL, near) == chosen


def test_the_kernels_lists() -> None:
    assert parse_cpus("0-23,48-71\n") == FIRST
    assert parse_cpus("3") == {3} and parse_cpus("\n") == set()


def make_gpus(root: Path, near: str, online: str) -> Path:
    write(root / "sys/devices/system/cpu/online", online)
    for bus, uuid in (("0000:10:1C.0", UUID), ("0000:a0:1C.0", "another")):
        write(
            root / f"proc/driver/nvidia/gpus/{bus}/information",
            f"Model: \t\t NVIDIA A100\nIRQ:   \t\t 410\nGPU UUID: \t GPU-{uuid}\nVideo BIOS: 92\n",
        )
    write(root / "sys/bus/pci/devices/0000:10:1c.0/local_cpulist", near)
    write(root / "sys/bus/pci/devices/0000:a0:1c.0/local_cpulist", "7\n")
    return root


def test_the_gpu_is_found_by_its_uuid(tmp_path: Path) -> None:
    make_gpus(tmp_path, "0-23,48-71\n", "0-95\n")
    assert cpus_near(UUID, tmp_path) == FIRST
    assert cpus_near("missing", tmp_path) == set()


def in_a_thread(what: Callable[[], T]) -> T:
    """Where its affinity ends with it."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(what()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_thread_and_those_that_it_starts_are_bound(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    one = min(mine)
    make_gpus(tmp_path, f"{one}\n", ",".join(map(str, mine)))

    def bound() -> tuple[object, set[int]]:
        return stay_near(UUID, tmp_path), in_a_thread(lambda: os.sched_getaffinity(0))

    assert in_a_thread(bound) == ({one}, {one})
    assert os.sched_getaffinity(0) == mine


def test_a_choice_stays(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    make_gpus(tmp_path, f"{min(mine)}\n", f"{','.join(map(str, mine))},{max(mine) + 1}")
    assert in_a_thread(lambda: (stay_near(UUID, tmp_path), os.sched_getaffinity(0))) == (None, mine)
