"""Checks of the operating system: limits, memory, clock, disks, ports and the kernel's log."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from elastic.doctor.finding import Finding
from elastic.doctor.gpu_checks import count_gpus
from elastic.doctor.loads.disk import nearest_there
from elastic.doctor.machine import Machine
from health.digits import three_digits
from health.kernel_log import open_kernel_log
from health.oom_kills import RAY_MONITOR
from health.signatures import find_signs
from trainer.backend.efa_settings import plan_efa

_GIB = 2**30

LEAST_MEMLOCK_BYTES = 16 * _GIB
"""EFA locks what it sends from. Source: awslabs/awsome-distributed-training,
2.gpu-cluster-healthcheck."""

SHM_BYTES_PER_GPU = _GIB
"""For NCCL's channels and data loaders; containers have 64 MiB by default. Snapshots come on
top."""

HUGE_PAGES_BYTES = 5120 * 2**20
"""What EFA takes where it uses them. Source: AWS's EKS guide (hugepages-2Mi: 5120Mi)."""

LARGEST_OFFSET_S = 0.1
"""The times in a run's records are compared across machines."""

LEAST_PORTS = 10_000
"""That the kernel hands out: every pair of workers has connections of its own. Invented."""
LEAST_FILES = 65_536
"""That a process may open. Source: Ray's guide for large clusters."""

LEAST_FREE_BYTES, LEAST_FREE_SHARE = 500 * 10**6, 0.1
"""Of a disk. Source: leptonai/gpud."""


def check_memlock(machine: Machine) -> Finding:
    """Whether EFA may lock the memory that it sends from."""
    limit = machine.memlock_bytes
    result = "unlimited" if limit is None else f"limit {three_digits(limit / _GIB)} GiB"
    if limit is None or limit >= LEAST_MEMLOCK_BYTES or not machine.uses_efa:
        return Finding(check="memlock", result=result)
    return Finding(
        check="memlock",
        result=result,
        severity="RESET",
        meaning="EFA cannot register memory (ibv_reg_mr failed, errno 12)",
        fix="Set memlock to unlimited in /etc/security/limits.conf, or --ulimit memlock=-1 for a "
        "container, and start Ray anew",
    )


def check_shared_memory(machine: Machine) -> Finding:
    """Whether /dev/shm holds what NCCL and data loaders put there."""
    there = os.statvfs(machine.root / "dev/shm")
    return judge_shared_memory(there.f_frsize * there.f_blocks, count_gpus(machine.root))


def judge_shared_memory(size_bytes: int, gpus: int) -> Finding:
    """As `check_shared_memory`, of numbers."""
    least = SHM_BYTES_PER_GPU * max(1, gpus)
    result = f"size {three_digits(size_bytes / _GIB)} GiB"
    if size_bytes >= least:
        return Finding(check="/dev/shm", result=result)
    return Finding(
        check="/dev/shm",
        result=f"{result}, of {three_digits(least / _GIB)} GiB at least",
        severity="RESET",
        meaning="NCCL and data loaders end with errors on /dev/shm/nccl-*, or a bus error",
        fix="--shm-size for a container, an emptyDir of medium Memory for a pod",
    )


def check_huge_pages(machine: Machine) -> Finding:
    """Whether there are huge pages, where EFA takes any."""
    plan = plan_efa(machine.facts, machine.environment)
    if all(one.yours in (None, "0") for one in plan.settings if one.name == _HUGE):
        return Finding(check="huge pages", result="not needed")
    text = (machine.root / "proc/meminfo").read_text(encoding="utf-8")
    numbers = {name: int(number) for name, number in re.findall(r"^(\w+):\s*(\d+)", text, re.M)}
    free = numbers.get("HugePages_Free", 0) * numbers.get("Hugepagesize", 0) * 1024
    result = f"free {three_digits(free / _GIB)} GiB"
    if free >= HUGE_PAGES_BYTES:
        return Finding(check="huge pages", result=result)
    return Finding(
        check="huge pages",
        result=f"{result}, of {three_digits(HUGE_PAGES_BYTES / _GIB)} GiB at least",
        severity="MONITOR",
        meaning="EFA goes without, or a fork fails: 'Cannot allocate memory'",
        fix=f"Unset {_HUGE}, or reserve 2560 pages of 2 MiB (vm.nr_hugepages; hugepages-2Mi)",
    )


_HUGE = "FI_EFA_USE_HUGE_PAGE"


def check_memory_monitor(machine: Machine) -> Finding:
    """Whether Ray leaves it to the kernel to end what takes too much memory, by the environment of
    this user's raylets. What a head was given by --system-config does not show there."""
    settings, in_pod = set[str](), False
    for name in (machine.root / "proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if name.read_bytes() == b"raylet\n":
                lines = name.with_name("environ").read_text(errors="replace").split("\0")
                environment = dict(line.split("=", 1) for line in lines if "=" in line)
                in_pod |= "KUBERNETES_SERVICE_HOST" in environment
                settings.add(environment.get(RAY_MONITOR, "not set"))
    if settings <= {"0"}:
        return Finding(check="memory monitor", result="off" if settings else "no raylet here")
    if in_pod:  # where the kernel's may end all of the pod
        return Finding(check="memory monitor", result="on, in a pod")
    return Finding(
        check="memory monitor",
        result=f"on ({RAY_MONITOR} {', '.join(sorted(settings))})",
        severity="MONITOR",
        meaning="where memory runs out, Ray ends a run's coordinator, supervisor and uploaders "
        "first, then its newest process, and the one that takes it perhaps last",
        fix=f"Start Ray with {RAY_MONITOR}=0 in its environment; the kernel takes the largest",
    )


def check_clock(machine: Machine) -> Finding:
    """Whether a time daemon keeps the clock."""
    clock = machine.clock
    if clock is None:
        return Finding(check="clock", result="not known")
    off = abs(clock.offset_s) > LARGEST_OFFSET_S
    if clock.synchronised and not off:
        return Finding(check="clock", result=f"kept, off by {three_digits(abs(clock.offset_s))} s")
    return Finding(
        check="clock",
        result=f"off by {three_digits(abs(clock.offset_s))} s" if off else "not synchronised",
        severity="MONITOR",
        meaning="times in the records of several machines do not fit together",
        fix="Start chrony, with server 169.254.169.123 on AWS; see `chronyc tracking`",
    )


def check_disks(machine: Machine) -> Finding:
    """Whether there is room where runs write."""
    spaces: list[tuple[str, int, int]] = []
    unknown: list[str] = []
    for folder in machine.folders:
        try:
            there = nearest_there(folder)
            name = str(folder) if there == folder else f"{folder} (not there yet, in {there})"
            spaces.append((name, *_space(there)))
        except OSError as error:  # of the others it tells nothing
            unknown.append(f"{folder}: {type(error).__name__}: {error.strerror}")
    return judge_disks(spaces, unknown)


def judge_disks(spaces: Sequence[tuple[str, int, int]], unknown: Sequence[str] = ()) -> Finding:
    """As `check_disks`. `spaces`: folder, free bytes, all bytes. `unknown`: folders of which nobody
    can tell, and why."""
    lines = [
        f"{folder} {three_digits(free / 1e9)} of {three_digits(size / 1e9)} GB"
        for folder, free, size in spaces
    ]
    full = [
        folder
        for folder, free, size in spaces
        if free < max(LEAST_FREE_BYTES, LEAST_FREE_SHARE * size)
    ]
    result = "; ".join([*([f"free: {', '.join(lines)}"] if lines else []), *unknown])
    if not full and not unknown:
        return Finding(check="disks", result=result)
    room = [f"Free space in {', '.join(full)}: at least a tenth and 500 MB"] if full else []
    look = ["Look at the mount (mount, df -h) and its rights"] if unknown else []
    return Finding(
        check="disks",
        result=result,
        severity="MONITOR",
        meaning="checkpoints and Ray's logs and objects need room there",
        fix="; ".join([*room, *look]),
    )


def _space(folder: Path) -> tuple[int, int]:
    there = os.statvfs(folder)
    return there.f_frsize * there.f_bavail, there.f_frsize * there.f_blocks


def check_ports(machine: Machine) -> Finding:
    """Whether there are ports and descriptors enough for the connections of a large run."""
    file = machine.root / "proc/sys/net/ipv4/ip_local_port_range"
    try:
        first, last = map(int, file.read_text(encoding="utf-8").split())
    except FileNotFoundError:
        return Finding(check="ports", result="not known")
    return judge_ports(last - first + 1, machine.open_files)


def judge_ports(ports: int, open_files: int | None) -> Finding:
    """As `check_ports`. `open_files`: that the process may have; None: any number."""
    files = "any number of" if open_files is None else open_files
    result = f"room for {ports} connections, {files} open files"
    if ports >= LEAST_PORTS and (open_files is None or open_files >= LEAST_FILES):
        return Finding(check="ports", result=result)
    return Finding(
        check="ports",
        result=result,
        severity="MONITOR",
        meaning="in a large run connections fail: 'Cannot assign requested address', or 'Too many "
        "open files'",
        fix=f"net.ipv4.ip_local_port_range with {LEAST_PORTS} at least; nofile {LEAST_FILES} in "
        "/etc/security/limits.conf, or --ulimit nofile for a container",
    )


_MOST_LINES = 50_000
"""Of the kernel's log."""


def check_kernel_log(machine: Machine) -> Finding:
    """What the kernel has said since the machine was booted: Xid errors, disks that failed."""
    kernel_log = open_kernel_log(machine.root / "dev/kmsg", past=True)
    if kernel_log is None:
        return Finding(check="kernel log", result="may not be read")
    lines: list[str] = []
    while len(lines) < _MOST_LINES and (more := kernel_log.read()):
        lines += more
    kernel_log.close()
    return judge_kernel_log(lines)


def judge_kernel_log(lines: Sequence[str]) -> Finding:
    """As `check_kernel_log`. Lines are evidence and no more: whoever can write some must not be
    able to have a machine taken out (docs/decisions/047)."""
    signs = [sign for sign in find_signs(lines, "kernel", "", 0.0) if sign.role == "root"]
    if not signs:
        return Finding(check="kernel log", result="no errors of hardware")
    steps = dict.fromkeys(sign.remedy for sign in signs if sign.remedy is not None)
    return Finding(
        check="kernel log",
        result="; ".join(f"{sign.name}: {sign.detail}" for sign in signs),
        severity="MONITOR",
        meaning="hardware has failed since the machine was booted",
        fix=f"If it has not been done since: {', '.join(steps) or 'look at dmesg'}",
    )
