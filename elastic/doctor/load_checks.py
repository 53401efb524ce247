"""Checks that load the machine: GPUs, or the CPU where there are none; memory; the group of a node.
A run beside them would be slowed, so they belong to the fuller tier."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path

from elastic.doctor.bounded import Outcome, Program, run_programs
from elastic.doctor.finding import Finding
from elastic.doctor.gpu_checks import count_gpus
from elastic.doctor.machine import Machine
from health.digits import three_digits

BURN_S = 3.0
BOUND_S = 90.0
"""On one load, with the imports and what a GPU takes to start."""

SLOWER = 0.95
"""Of the median of the machine's GPUs: below is slow. Source: SuperBench, > 5 % below the
baseline."""

LEAST_HOST_BYTES_PER_S = {"p4": 23e9, "p5": 52e9}
"""Between host and GPU, by the family of the machine. Source: Azure NHC (2026-05), A100 and H100
on PCIe 4 and 5."""

LEAST_BUS_BYTES_PER_S = {"p4": 200e9, "p5": 460e9, "p6": 600e9}
"""Of an all-reduce over NVLink. Source: awsome-distributed-training, 2.gpu-cluster-healthcheck; of
H100 the lower figure of Azure NHC."""

_RANKS_ON_CPU = 2


def devices_of(machine: Machine) -> list[str]:
    """What to load, as torch names it: of the machine's GPUs those that this process may use."""
    gpus, visible = count_gpus(machine.root), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = (name.strip() for name in visible.split(","))
        # CUDA ends the list at the first other one, and takes none where one comes twice.
        own = list(takewhile(partial(_is_one, gpus=gpus), names))
        gpus = min(gpus, len(own)) if len(set(own)) == len(own) else 0
    return [f"cuda:{number}" for number in range(gpus)] or ["cpu"]


def _is_one(name: str, gpus: int) -> bool:
    """Whether a part of CUDA_VISIBLE_DEVICES is one of the machine's GPUs, unlike -1 and Slurm's
    NoDevFiles."""
    return (name.isdecimal() and int(name) < gpus) or name.startswith(("GPU-", "MIG-"))


def _on_each(machine: Machine, load: str, *arguments: str) -> dict[str, Outcome]:
    """What a load finds on each device, all at once."""
    devices = devices_of(machine)
    module = f"elastic.doctor.loads.{load}"
    programs = [Program(module=module, arguments=("--device", d, *arguments)) for d in devices]
    return dict(zip(devices, run_programs(programs, BOUND_S), strict=True))


def check_burn(machine: Machine) -> Finding:
    """Whether each device multiplies correctly, and none is slower than the others."""
    return judge_burn(_on_each(machine, "burn", "--seconds", f"{BURN_S:g}"))


def judge_burn(outcomes: Mapping[str, Outcome]) -> Finding:
    """As `check_burn`. `outcomes`: device -> what `loads/burn.py` found."""
    wrong = {d: n for d, one in outcomes.items() if (n := one.found.get("wrong"))}
    if wrong:
        return Finding(
            check="matrix burn",
            result=", ".join(
                f"{d}: {n} of {outcomes[d].found['products']} products wrong"
                for d, n in wrong.items()
            ),
            severity="ISOLATE",
            meaning="it computes wrong numbers, and nothing else will tell",
            fix="Replace the machine",
        )
    if (failed := _judge_failed("matrix burn", outcomes)) is not None:
        return failed
    return _judge_speed("matrix burn", outcomes, "flops", 1e12, "TFLOP/s")


def check_memory_speed(machine: Machine) -> Finding:
    """How fast each device copies its memory."""
    outcomes = _on_each(machine, "copies")
    return _judge_failed("memory speed", outcomes) or _judge_speed(
        "memory speed", outcomes, "memory", 1e9, "GB/s"
    )


def check_host_link(machine: Machine) -> Finding:
    """How fast data comes to each GPU and goes."""
    if not count_gpus(machine.root):
        return Finding(check="host to GPU", result="no GPU")
    return judge_host_link(_on_each(machine, "copies"), machine.facts.instance or "")


def judge_host_link(outcomes: Mapping[str, Outcome], instance: str) -> Finding:
    """As `check_host_link`, of a type of machine."""
    check = "host to GPU"
    if (failed := _judge_failed(check, outcomes)) is not None:
        return failed
    least = LEAST_HOST_BYTES_PER_S.get(instance[:2], 0.0)
    speed = {d: min(o.found["to_device"], o.found["to_host"]) for d, o in outcomes.items()}
    slow = {d: one for d, one in speed.items() if one < least}
    if not slow:
        slowest = three_digits(min(speed.values()) / 1e9)
        return Finding(check=check, result=f"at least {slowest} GB/s")
    return Finding(
        check=check,
        result=_each(slow, 1e9, f"of {three_digits(least / 1e9)} GB/s"),
        severity="MONITOR",
        meaning="checkpoints, heals and the data come slower",
        fix="Look whether the link of the GPU is degraded (nvidia-smi -q: PCIe link width and "
        "generation); a reboot trains it anew",
    )


def check_all_reduce(machine: Machine) -> Finding:
    """Whether the devices of the node sum up correctly together, and how fast."""
    devices = devices_of(machine)
    if devices == ["cpu"]:
        devices *= _RANKS_ON_CPU
    if len(devices) == 1:
        return Finding(check="all-reduce in the node", result="one GPU")
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        store = f"file:{Path(folder) / 'meet'}"
        outcomes = run_programs(ranks(store, devices, 0, len(devices)), BOUND_S)
    named = {f"rank {rank}": outcome for rank, outcome in enumerate(outcomes)}
    return judge_all_reduce(named, machine.facts.instance or "")


def ranks(store: str, devices: list[str], first: int, size: int) -> list[Program]:
    """Ranks of a group that meets at `store`, from `first` on, one on each of `devices`."""
    return [
        Program(
            module="elastic.doctor.loads.all_reduce",
            arguments=(
                *("--store", store, "--device", device),
                *("--rank", str(first + place), "--size", str(size)),
            ),
        )
        for place, device in enumerate(devices)
    ]


def judge_all_reduce(outcomes: Mapping[str, Outcome], instance: str) -> Finding:
    """As `check_all_reduce`, of a type of machine."""
    check = "all-reduce in the node"
    wrong = count_wrong(outcomes.values())
    if wrong:
        return Finding(
            check=check,
            result=f"{wrong} wrong sums",
            severity="ISOLATE",
            meaning="what goes between the devices arrives as something else",
            fix="Replace the machine",
        )
    if (failed := _judge_failed(check, outcomes)) is not None:
        return failed
    bus, least = (
        min(one.found["bus"] for one in outcomes.values()),
        LEAST_BUS_BYTES_PER_S.get(instance[:2], 0.0),
    )
    result = f"ranks: {len(outcomes)}, bus {three_digits(bus / 1e9)} GB/s"
    if bus >= least:
        return Finding(check=check, result=result)
    return Finding(
        check=check,
        result=f"{result}, of {three_digits(least / 1e9)} GB/s",
        severity="MONITOR",
        meaning="each step waits for it",
        fix="Look at NVLink (nvidia-smi nvlink -s: all links up; nvidia-smi topo -m), and whether "
        "nvidia-fabricmanager runs",
    )


def count_wrong(outcomes: Iterable[Outcome]) -> int:
    """Sums that came out wrong, of all ranks that have told theirs: one that fails afterwards does
    not take back what it has seen."""
    return sum(int(one.found.get("wrong", 0)) for one in outcomes)


def _judge_failed(check: str, outcomes: Mapping[str, Outcome]) -> Finding | None:
    """A finding where not all have an answer."""
    silent = {name: one for name, one in outcomes.items() if one.trouble}
    if not silent:
        return None
    late = any(one.late for one in silent.values())
    return Finding(
        check=check,
        result="; ".join(f"{name}: {one.trouble}" for name, one in silent.items()),
        severity="REBOOT" if late else "RESET",
        meaning="work hangs there" if late else "work fails there",
        fix="Reboot the machine; if it comes again, replace it"
        if late
        else "Do what the error says; if it speaks of the GPU, reset it (nvidia-smi --gpu-reset)",
    )


def _judge_speed(
    check: str, outcomes: Mapping[str, Outcome], what: str, unit: float, name: str
) -> Finding:
    """Holds the devices of a machine against each other."""
    speed = {device: float(one.found[what]) for device, one in outcomes.items()}
    median = statistics.median(speed.values())
    slow = {device: one for device, one in speed.items() if one < SLOWER * median}
    if not slow:
        slowest = three_digits(min(speed.values()) / unit)
        return Finding(check=check, result=f"at least {slowest} {name}")
    return Finding(
        check=check,
        result=_each(slow, unit, f"of {three_digits(median / unit)} {name}"),
        severity="MONITOR",
        meaning="all others wait for the slowest in each step",
        fix="Look why its clocks are lower (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER); "
        "replace the machine if it stays",
    )


def _each(numbers: Mapping[str, float], unit: float, rest: str) -> str:
    each = (f"{name}: {three_digits(number / unit)}" for name, number in numbers.items())
    return f"{', '.join(each)} {rest}"


LOAD_CHECKS: Mapping[str, Callable[[Machine], Finding]] = {
    "matrix burn": check_burn,
    "memory speed": check_memory_speed,
    "host to GPU": check_host_link,
    "all-reduce in the node": check_all_reduce,
}
"""Name -> check, in the order in which they are done, one after the other."""
