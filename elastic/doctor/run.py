"""Runs the checks. Those of the quick tier beside each other: a file system or a driver that does
not answer holds up nobody else. Those that load the machine one after the other; each has a bound
of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from elastic.doctor import (
    affinity_check,
    efa_checks,
    gpu_checks,
    load_checks,
    storage_checks,
    system_checks,
)
from elastic.doctor.finding import Finding
from elastic.doctor.machine import Machine

Check = Callable[[Machine], Finding]

BOUND_S = 30.0
"""On all of them together."""

CHECKS: Mapping[str, Check] = {
    "instance": efa_checks.check_instance,
    "GPUs": gpu_checks.check_gpus,
    "GPU errors": gpu_checks.check_gpu_health,
    "EFA devices": efa_checks.check_devices,
    "affinity": affinity_check.check_affinity,
    "EFA provider": efa_checks.check_provider,
    "NCCL plugin": efa_checks.check_plugin,
    **efa_checks.VERSION_CHECKS,
    "environment": efa_checks.check_environment,
    "memlock": system_checks.check_memlock,
    "/dev/shm": system_checks.check_shared_memory,
    "huge pages": system_checks.check_huge_pages,
    "clock": system_checks.check_clock,
    "disks": system_checks.check_disks,
    "ports": system_checks.check_ports,
    "memory monitor": system_checks.check_memory_monitor,
    "kernel log": system_checks.check_kernel_log,
}
"""Those of the quick tier: name -> check, in the order in which they are shown."""


def run_checks(
    machine: Machine, checks: Mapping[str, Check] = CHECKS, bound_s: float = BOUND_S
) -> list[Finding]:
    """What all checks say, in their order. One that raises, or is not done in time, is told of as
    one that failed."""
    found: dict[str, Finding] = {}

    def examine(name: str, check: Check) -> None:
        found[name] = try_check(name, check, machine)

    threads = [threading.Thread(target=examine, args=one, daemon=True) for one in checks.items()]
    end = time.monotonic() + bound_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    done = dict(found)
    return [done.get(name) or failed(name, f"no answer in {bound_s:g} s") for name in checks]


def run_full(machine: Machine, stores: tuple[str, ...] = ()) -> list[Finding]:
    """What the quick tier says, and then the checks that load the machine.

    Args:
        machine: it.
        stores: URLs of those that are tried, besides the machine's folders.
    """
    loads: dict[str, Check] = {
        **load_checks.LOAD_CHECKS,
        "disk speed": storage_checks.check_folders,
        **storage_checks.store_checks(stores),
    }
    quick = run_checks(machine)
    return [*quick, *(try_check(name, check, machine) for name, check in loads.items())]


def try_check(name: str, check: Check, machine: Machine) -> Finding:
    """What a check says; one that raises is told of as one that failed."""
    try:
        return check(machine)
    except Exception as error:
        return failed(name, f"{type(error).__name__}: {error}")


def failed(name: str, what: str) -> Finding:
    """What is told of a check that could not be done. `what`: has come of it instead."""
    return Finding(
        check=name,
        result=what,
        severity="MONITOR",
        meaning="the check could not be done",
        fix="Run it again; if it fails again, look into the kernel's log (dmesg)",
    )
