"""`elastic doctor --cluster`: each machine of a Ray cluster, and machines in pairs.

The machines meet at a store in this process. A machine with GPUs takes part with all that Ray has
there, which must be free; on others one process takes part, on the CPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.coordinator.listening import host_store
from elastic.doctor.bounded import run_programs
from elastic.doctor.finding import Finding
from elastic.doctor.load_checks import count_wrong, devices_of, ranks
from elastic.doctor.machine import machine_with
from elastic.doctor.pairs import Measured, Pair, count_rounds, judge_pairs, plan_round
from elastic.doctor.run import run_checks, run_full
from elastic.doctor.system_checks import LARGEST_OFFSET_S
from elastic.ray_compat.cluster import Failed, nodes_with_room, on_nodes, own_address
from health.digits import three_digits

_PAIR_BOUND_S = 120.0
_LOOK_BOUND_S, _FULL_BOUND_S = 60.0, 600.0
_START_S = 30.0
"""What Ray may take to start a process on a node, beside what that does."""


Answer = tuple[float, str, int]
"""Of a machine in a pair: bytes per second, why it failed, and how many sums were wrong."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a machine has found of itself."""

    began: float
    """Seconds since the epoch, by its clock."""
    ended: float
    """The same."""
    findings: list[Finding]
    """Its checks'."""
    devices: list[str]
    """What a load would use."""


def examine_cluster(*, full: bool, storage: Sequence[str] = ()) -> list[Finding]:
    """All that is found. This process has joined the cluster.

    Args:
        full: each machine does the checks that load it, too.
        storage: directories and URLs of stores that each looks at.
    """
    nodes = nodes_with_room()
    gpus = {node: found.gpus for node, found in nodes.items()}
    names = name_machines({node: found.address for node, found in nodes.items()})
    asked = time.time()
    looks = on_nodes(
        look_at_machine,
        {node: (full, tuple(storage)) for node in nodes},
        gpus=gpus if full else {},
        timeout_s=(_FULL_BOUND_S if full else _LOOK_BOUND_S) + _START_S,
    )
    answered = time.time()
    found: list[Finding] = []
    for node, look in looks.items():
        if isinstance(look, Failed):
            found.append(_silent(names[node], look))
        else:
            found += [replace(one, node=names[node]) for one in look.findings]
            found.append(judge_clock(names[node], look, asked, answered))
    whole = {node: look for node, look in looks.items() if not isinstance(look, Failed)}
    measured, absent = _run_rounds(whole, gpus, names)
    found += [_silent(names[node], failed, "it took no part in pairs") for node, failed in absent]
    return found + judge_pairs(measured)


def look_at_machine(full: bool, storage: tuple[str, ...]) -> Look:
    """Runs on each machine."""
    began = time.time()
    machine, stores = machine_with(storage)
    findings = run_full(machine, stores) if full else run_checks(machine)
    return Look(began=began, ended=time.time(), findings=findings, devices=devices_of(machine))


def name_machines(addresses: Mapping[str, str]) -> dict[str, str]:
    """Node -> its address, with the node's id where several have the same."""
    count = Counter(addresses.values())
    return {
        node: address if count[address] == 1 else f"{address}/{node[:6]}"
        for node, address in addresses.items()
    }


def judge_clock(name: str, look: Look, asked: float, answered: float) -> Finding:
    """Whether a machine's clock is that of this one: what it does lies between question and
    answer."""
    off = max(asked - look.began, look.ended - answered, 0.0)
    if off <= LARGEST_OFFSET_S:
        return Finding(check="clock of the cluster", node=name, result="fits")
    return Finding(
        check="clock of the cluster",
        node=name,
        result=f"off by {three_digits(off)} s at least",
        severity="MONITOR",
        meaning="times in the records of several machines do not fit together; S3 refuses requests "
        "from 15 minutes on",
        fix="Start chrony on all machines, with server 169.254.169.123 on AWS",
    )


def _silent(name: str, failed: Failed, meaning: str = "nothing is known of it") -> Finding:
    return Finding(
        check="machine",
        node=name,
        result=failed.why,
        severity="RESET",
        meaning=meaning,
        fix="Install this package where its Python has no module elastic; where its GPUs are in "
        "use, wait for the run to end; else look at its raylet's log",
    )


def _run_rounds(
    looks: Mapping[str, Look], gpus: Mapping[str, float], names: Mapping[str, str]
) -> tuple[list[Measured], list[tuple[str, Failed]]]:
    """Tries machines in pairs, those with GPUs where there are any. Returns what the pairs did, and
    the machines that took no part."""
    devices = plan_devices({node: look.devices for node, look in looks.items()}, gpus)
    machines = list(devices)
    measured: list[Measured] = []
    absent: dict[str, Failed] = {}
    if len(machines) < 2:
        return measured, []
    host = own_address()
    store = host_store(host)
    for number in range(count_rounds(len(machines))):
        pairs = plan_round([node for node in machines if node not in absent], measured)
        answers = _run_round(pairs, devices, gpus, f"tcp:{host}:{store.port}/{number}")
        absent |= {node: one for node, one in answers.items() if isinstance(one, Failed)}
        measured += measure(pairs, answers)
    return [replace(one, pair=(names[one.pair[0]], names[one.pair[1]])) for one in measured], list(
        absent.items()
    )


def plan_devices(
    devices: Mapping[str, list[str]], gpus: Mapping[str, float]
) -> dict[str, list[str]]:
    """What takes part in pairs, by machine: of its GPUs as many as Ray has there, as a process sees
    no others; the CPUs where no machine has any. Pure.

    Args:
        devices: machine -> what it has found; a look without GPUs of Ray's sees all of them.
        gpus: machine -> GPUs that Ray has there.
    """
    with_gpus = {
        node: found[: int(gpus[node])]
        for node, found in devices.items()
        if found != ["cpu"] and int(gpus[node])
    }
    return with_gpus or {node: ["cpu"] for node in devices}


Part = tuple[str, list[str], int, int]
"""Of a machine in a pair: where it meets the other, its devices, the first one's rank, and the
ranks of both."""


def plan_parts(
    pairs: Sequence[Pair], devices: Mapping[str, list[str]], meet: str
) -> dict[str, Part]:
    """Machine -> its part in a round. Both of a pair use as many devices. Pure."""
    parts = {}
    for place, pair in enumerate(pairs):
        each = min(len(devices[node]) for node in pair)
        for first, node in zip((0, each), pair, strict=True):
            parts[node] = (f"{meet}/{place}", devices[node][:each], first, 2 * each)
    return parts


def _run_round(
    pairs: Sequence[Pair],
    devices: Mapping[str, list[str]],
    gpus: Mapping[str, float],
    meet: str,
) -> dict[str, Answer | Failed]:
    parts = plan_parts(pairs, devices, meet)
    return on_nodes(
        take_part,
        parts,
        gpus={node: gpus[node] for node in parts if devices[node] != ["cpu"]},
        timeout_s=_PAIR_BOUND_S + _START_S,
    )


def take_part(store: str, devices: list[str], first: int, size: int) -> Answer:
    """Runs on each machine of a pair."""
    outcomes = run_programs(ranks(store, devices, first, size), _PAIR_BOUND_S)
    wrong = count_wrong(outcomes)
    if trouble := next((one.trouble for one in outcomes if one.trouble), ""):
        return 0.0, trouble, wrong
    return min(float(one.found["bus"]) for one in outcomes), "", wrong


def measure(pairs: Sequence[Pair], answers: Mapping[str, Answer | Failed]) -> list[Measured]:
    """What pairs did, by what their machines answered. A pair of which one did not even begin, as
    its GPUs were in use, says nothing of either. Pure."""
    found = []
    for pair in pairs:
        told = [one for one in map(answers.__getitem__, pair) if not isinstance(one, Failed)]
        if len(told) == len(pair):
            speeds, troubles, wrong = zip(*told, strict=True)
            trouble = next(filter(None, troubles), "")
            speed = 0.0 if trouble else min(speeds)
            found.append(Measured(pair=pair, bytes_per_s=speed, trouble=trouble, wrong=sum(wrong)))
    return found
