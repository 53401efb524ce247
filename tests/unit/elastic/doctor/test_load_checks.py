"""The checks that load the machine: the loads themselves on this machine's CPU, in a process of
their own as `elastic doctor --full` does it, and what is said of numbers."""

from __future__ import annotations

import os
import sys
import time
import venv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.doctor import load_checks
from elastic.doctor.bounded import Outcome, Program, run_programs
from elastic.doctor.load_checks import (
    check_all_reduce,
    check_burn,
    check_memory_speed,
    devices_of,
    judge_all_reduce,
    judge_burn,
    judge_host_link,
)
from elastic.doctor.loads.burn import burn
from elastic.doctor.machine import Machine, this_machine
from tests.support.watching import wait_until

CPU = torch.device("cpu")


def found(**numbers: Any) -> Outcome:
    return Outcome(found=numbers)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return this_machine({}, (tmp_path,))


@pytest.mark.slow
def test_the_burn_of_a_whole_machine(machine: Machine) -> None:
    finding = check_burn(machine)
    assert finding.severity == "OK" and finding.result.endswith("TFLOP/s")


def test_one_wrong_bit_in_one_product_is_seen() -> None:
    calls = []

    def bent(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = left @ right
        calls.append(1)
        if len(calls) == 5:
            product.view(torch.int32)[17, 3] ^= 1
        return product

    numbers = burn(CPU, 0.0, bent)
    assert len(calls) == 9 and (numbers["products"], numbers["wrong"]) == (8, 1)
    finding = judge_burn({"cuda:0": found(**numbers), "cuda:1": found(**burn(CPU, 0.0))})
    assert (finding.severity, finding.result) == ("ISOLATE", "cuda:0: 1 of 8 products wrong")


def test_a_gpu_that_is_slower_than_the_others_is_named() -> None:
    whole = found(products=8, wrong=0, flops=600e12)
    outcomes = {f"cuda:{n}": whole for n in range(8)}
    assert judge_burn(outcomes).result == "at least 600 TFLOP/s"
    outcomes["cuda:5"] = found(products=8, wrong=0, flops=569e12)
    finding = judge_burn(outcomes)
    assert (finding.severity, finding.result) == ("MONITOR", "cuda:5: 569 of 600 TFLOP/s")
    outcomes["cuda:5"] = found(products=8, wrong=0, flops=571e12)
    assert judge_burn(outcomes).severity == "OK"


@pytest.mark.parametrize(("late", "severity"), [(False, "RESET"), (True, "REBOOT")])
def test_a_gpu_that_does_not_do_it_is_named(late: bool, severity: str) -> None:
    ill = Outcome(found={}, trouble="CUDA error: uncorrectable ECC error", late=late)
    finding = judge_burn({"cuda:0": found(products=8, wrong=0, flops=1.0), "cuda:1": ill})
    assert (finding.severity, finding.result) == (severity, f"cuda:1: {ill.trouble}")
    wrong = judge_burn({"cuda:0": found(products=8, wrong=1, flops=1.0), "cuda:1": ill})
    assert wrong.severity == "ISOLATE", "what fails on one hides nothing of the others"


def test_no_gpu_is_loaded_that_this_process_may_not_use(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_checks, "count_gpus", lambda root: 8)
    assert len(devices_of(machine)) == 8
    for visible, count in (
        ("4,5", 2),
        (" 4, GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 2),
        ("4,-1,5", 1),
        ("4,²,5", 1),
        ("4,5,4", 0),
        ("8", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("", 0),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices_of(machine) == ([f"cuda:{n}" for n in range(count)] or ["cpu"]), visible


@pytest.mark.slow
def test_memory_and_the_group_of_a_node(machine: Machine) -> None:
    assert check_memory_speed(machine).result.endswith("GB/s")
    finding = check_all_reduce(machine)
    assert finding.severity == "OK" and finding.result.startswith("ranks: 2, bus ")


def test_a_wrong_sum_isolates() -> None:
    well = {f"rank {n}": found(wrong=0, bus=470e9) for n in range(8)}
    assert judge_all_reduce(well, "p5.48xlarge").severity == "OK"
    ill = {**well, "rank 3": found(wrong=1, bus=470e9)}
    assert judge_all_reduce(ill, "p5.48xlarge").severity == "ISOLATE"
    slow = {**well, "rank 3": found(wrong=0, bus=450e9)}
    assert judge_all_reduce(slow, "p5.48xlarge").severity == "MONITOR"
    assert judge_all_reduce(slow, "p4d.24xlarge").severity == "OK"
    gone = Outcome(found={}, trouble="connection reset by peer")
    assert judge_all_reduce({**well, "rank 2": gone}, "p5.48xlarge").severity == "RESET"
    proof = judge_all_reduce({**ill, "rank 2": gone}, "p5.48xlarge")
    assert (proof.severity, proof.result) == ("ISOLATE", "1 wrong sums")


def test_a_slow_link_to_the_host() -> None:
    numbers = {"cuda:0": found(to_device=55e9, to_host=53e9)}
    assert judge_host_link(numbers, "p5.48xlarge").severity == "OK"
    numbers["cuda:1"] = found(to_device=55e9, to_host=26e9)
    finding = judge_host_link(numbers, "p5.48xlarge")
    assert (finding.severity, finding.result) == ("MONITOR", "cuda:1: 26 of 52 GB/s")


def test_a_program_that_hangs_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tmp_path / "pids"
    (tmp_path / "hangs.py").write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(ids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(1000)\n"
    )
    (tmp_path / "fails.py").write_text("raise ValueError('no such thing')")
    (tmp_path / "works.py").write_text("print('a line'); print('{\"result\": {\"a\": 1}}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begin_s = time.monotonic()
    hung, failed, worked = run_programs(
        [Program(module=name) for name in ("hangs", "fails", "works")], 3.0
    )
    assert time.monotonic() - begin_s < 10
    assert hung.late and hung.trouble == "no answer in 3 s"
    assert failed.trouble == "ValueError: no such thing" and not failed.late
    assert worked.found == {"a": 1}
    for pid in map(int, ids.read_text().split()):  # the kernel ends what was killed in its own time
        wait_until(partial(is_over, pid), 10.0)


def test_what_libraries_say_is_not_taken_for_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = 'print(\'{"result": {"a": 1}}\')\n'
    warns = "import warnings; warnings.warn('which device?')\n"
    logs = "print('node:1:1 [0] NCCL INFO comm destroyed'); print('7')\n"
    logs += 'print(\'{"level": "info"}\'); print(\'{"result": 0}\')\n'
    programs = {
        "noisy": result + warns + logs,
        "no_object": "print('7')",
        "fails_later": result + logs + warns + "raise ValueError('lost a peer')",
        "says_why": "print('no such device'); raise SystemExit(1)",
    }
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcomes = run_programs([Program(module=name) for name in programs], 30.0)
    assert [(one.found, one.trouble) for one in outcomes] == [
        ({"a": 1}, ""),
        ({}, "7"),
        ({"a": 1}, "ValueError: lost a peer"),
        ({}, "no such device"),
    ]


@pytest.mark.parametrize("python_path", [None, f"{os.pathsep}/none", f"/none{os.pathsep}"])
def test_programs_take_no_module_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str | None
) -> None:
    """`elastic doctor` may be called anywhere. Where it is not installed it finds itself."""
    for name in ("json", "runpy", "torch", "elastic"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from here')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path)
    assert_writes(tmp_path)


def test_programs_are_of_this_package_also_where_another_version_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m elastic.cli` was called in a checkout."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "elastic.py").write_text("raise SystemExit('the installed one')\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert_writes(tmp_path)


def assert_writes(folder: Path) -> None:
    """A load of this package runs."""
    disk = Program(module="elastic.doctor.loads.disk", arguments=(str(folder),))
    (outcome,) = run_programs([disk], 60.0)
    assert outcome.trouble == "" and outcome.found["write"] > 0


def is_over(pid: int) -> bool:
    """A child of the one that was killed is somebody else's to reap."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return not os.path.exists(f"/proc/{pid}")
