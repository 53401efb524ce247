"""Whether each GPU has processors and EFA devices of its own NUMA node: what goes through the other
socket is slower."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from elastic.doctor.finding import Finding
from elastic.doctor.gpu_checks import given_gpus
from elastic.doctor.machine import Machine
from trainer.backend.near_gpu import parse_cpus, text_of


def check_affinity(machine: Machine) -> Finding:
    """Where the GPUs that were given to this process lie, its CPUs, and the EFA devices."""
    nodes = machine.root / "sys/devices/system/node"
    gpus = Counter(
        _numa_node(machine.root / "sys/bus/pci/devices" / file.parent.name.lower())
        for file in given_gpus(machine.root)
    )
    devices = Counter(
        _numa_node(machine.root / "sys/class/infiniband" / name / "device")
        for name in machine.facts.devices
    )
    cpus = {node: parse_cpus(text_of(nodes / f"node{node}/cpulist")) for node in gpus}
    return judge_affinity(gpus, devices, cpus, os.sched_getaffinity(0))


def judge_affinity(
    gpus: Mapping[int, int],
    devices: Mapping[int, int],
    cpus: Mapping[int, Set[int]],
    allowed: Set[int],
) -> Finding:
    """As `check_affinity`, of numbers.

    Args:
        gpus: NUMA node -> GPUs there; node -1: the machine does not tell.
        devices: NUMA node -> EFA devices there.
        cpus: NUMA node -> its CPUs; none, where the machine does not tell.
        allowed: the CPUs that this process may use.
    """
    if not gpus:
        return Finding(check="affinity", result="no GPU")
    if -1 in gpus:
        return Finding(check="affinity", result="the machine tells no NUMA nodes")
    result = ", ".join(
        f"NUMA node {node}: {gpus[node]} GPUs, {devices.get(node, 0)} EFA devices"
        for node in sorted(gpus)
    )
    told = any(devices.values()) and -1 not in devices
    bare = [node for node in sorted(gpus) if told and not devices.get(node)]
    far = [node for node in sorted(gpus) if cpus[node] and not cpus[node] & allowed]
    ills: list[tuple[str, str]] = []
    if bare:
        fix = "Launch the machine with an EFA interface on each network card"
        ills.append((f"no EFA device beside the GPUs of {_named(bare)}", fix))
    if far:
        fix = "Give the container CPUs of each NUMA node (its cpuset)"
        ills.append((f"no CPU beside the GPUs of {_named(far)} may be used", fix))
    if not ills:
        return Finding(check="affinity", result=result)
    return Finding(
        check="affinity",
        result="; ".join([result, *(ill for ill, _ in ills)]),
        severity="MONITOR",
        meaning="what these GPUs send and receive goes through the other socket",
        fix="; ".join(fix for _, fix in ills),
    )


def _named(nodes: Sequence[int]) -> str:
    return f"NUMA node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def _numa_node(device: Path) -> int:
    """-1: the machine does not tell, as the kernel puts it."""
    return int(text_of(device / "numa_node") or -1)
