"""Which machines are tried together, and what follows from how fast they were. Pure.

A machine that is slow makes its partner look slow. So everybody is tried with several others, the
slow ones with the fast ones, and its best round counts: whoever is slow with everybody is slow
itself. About log2 N rounds do, for the partners of a bad machine are cleared by others. All pairs
of a round run at once. Sums that are wrong are not slowness: no better round makes up for them.
They are explained by partners that are isolated.

Source: DLRover's check of nodes in two rounds; here the rounds grow with the cluster, so that
several bad machines are told apart.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic.doctor.finding import Finding
from health.digits import three_digits

SLOW = 0.75
"""Of the median: below is slow. Source: nvidia-resiliency-ext's score of stragglers."""

CHECK = "pairs of machines"

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a pair of machines did."""

    pair: Pair
    """They."""
    bytes_per_s: float = 0.0
    """Of the bus in an all-reduce; 0 where it failed."""
    trouble: str = ""
    """Why it failed."""
    wrong: int = 0
    """Sums that came out wrong, whatever their speed."""


def count_rounds(machines: int) -> int:
    """Rounds that are needed: two at least, where there are partners enough; one more where one
    machine sits out in each."""
    if machines < 3:
        return machines // 2
    return max(2, math.ceil(math.log2(machines))) + machines % 2


def plan_round(machines: Sequence[str], so_far: Sequence[Measured]) -> list[Pair]:
    """The pairs of the next round: the slowest with the fastest that it has not met. Of an odd
    number one sits out that has not before."""
    best, met = _best(so_far), _partners(so_far)
    waiting = sorted(machines, key=lambda machine: best.get(machine, 0.0))
    if len(waiting) % 2:
        waiting.remove(max(reversed(waiting), key=lambda machine: len(met[machine])))
    pairs: list[Pair] = []
    while waiting:
        slow = waiting.pop(0)
        fast = next((m for m in reversed(waiting) if m not in met[slow]), waiting[-1])
        waiting.remove(fast)
        pairs.append((slow, fast))
        if fast in met[slow]:
            _exchange(pairs, met)
    return pairs


def _exchange(pairs: list[Pair], met: Mapping[str, Sequence[str]]) -> None:
    """The last two have met: gives them the partners of another pair, where nobody of the four has
    met its new one."""
    first, second = pairs[-1]
    for place, (third, fourth) in enumerate(pairs[:-1]):
        for mine, yours in ((third, fourth), (fourth, third)):
            if mine not in met[first] and yours not in met[second]:
                pairs[place], pairs[-1] = (first, mine), (second, yours)
                return


def judge_pairs(measured: Sequence[Measured]) -> list[Finding]:
    """What is said of each machine, and of the ways between them."""
    best, met = _best(measured), _partners(measured)
    bad = {m for m in met if not best[m] and any(best[partner] for partner in met[m])}
    usual = statistics.median([speed for speed in best.values() if speed] or [0.0])
    falsified = _partners([one for one in measured if one.wrong])
    own = _find_own(falsified)
    unexplained = {m for m in falsified.keys() - bad if not bad | own >= {*falsified[m]}}
    found = [
        _of_wrong(m, m in own, measured)
        if m in own | unexplained
        else _of_machine(m, best[m], usual, measured, m in bad)
        for m in met
    ]
    return [*found, *_of_ways(measured, bad, best, usual)]


def _best(measured: Sequence[Measured]) -> dict[str, float]:
    best: dict[str, float] = defaultdict(float)
    for one in measured:
        for machine in one.pair:
            best[machine] = max(best[machine], one.bytes_per_s)
    return best


def _partners(measured: Sequence[Measured]) -> Mapping[str, list[str]]:
    partners: dict[str, list[str]] = defaultdict(list)
    for one in measured:
        first, second = one.pair
        partners[first].append(second)
        partners[second].append(first)
    return partners


def _find_own(falsified: Mapping[str, Sequence[str]]) -> set[str]:
    """Machines whose wrong sums are their own: those that had them in two rounds or more, unless
    their partners in these all had as many. Then they may have met those at fault.

    Args:
        falsified: machine -> its partners in the rounds with wrong sums.
    """
    return {
        machine
        for machine, partners in falsified.items()
        if any(len(falsified[partner]) < len(partners) for partner in partners)
    }


def _of_machine(
    machine: str, best: float, usual: float, measured: Sequence[Measured], bad: bool
) -> Finding:
    rounds = [one for one in measured if machine in one.pair]
    result = f"bus {three_digits(best / 1e9)} GB/s, the best of {len(rounds)} rounds"
    if bad:
        return Finding(
            check=CHECK,
            node=machine,
            result=f"failed with all of {len(rounds)}: {rounds[-1].trouble}",
            severity="ISOLATE",
            meaning="its partners work with others, and with it nobody does",
            fix="Replace the machine; before, look at its security group and its interface",
        )
    if best and best < SLOW * usual:
        return Finding(
            check=CHECK,
            node=machine,
            result=f"{result}; the median is {three_digits(usual / 1e9)} GB/s",
            severity="MONITOR",
            meaning="it is slow with everybody, and all wait for it",
            fix="`elastic doctor --full` there; replace the machine if it stays",
        )
    if not best:
        return Finding(
            check=CHECK,
            node=machine,
            result=f"failed: {rounds[-1].trouble}",
            severity="RESET",
            meaning="it, its partner, or the way between them; nobody else tells which",
            fix="Open all ports between the machines (the security group, from and to itself); try "
            "with more machines to learn which it is",
        )
    return Finding(check=CHECK, node=machine, result=result)


def _of_wrong(machine: str, own: bool, measured: Sequence[Measured]) -> Finding:
    """Of a machine that had wrong sums, which no other round takes back; are they its own?"""
    rounds = [one for one in measured if machine in one.pair]
    falsified = [one for one in rounds if one.wrong]
    wrong = sum(one.wrong for one in falsified)
    partners = ", ".join(m for one in falsified for m in one.pair if m != machine)
    return Finding(
        check=CHECK,
        node=machine,
        result=f"{wrong} wrong sums, in {len(falsified)} of {len(rounds)} rounds, with {partners}",
        severity="ISOLATE" if own else "RESET",
        meaning="what goes between the machines arrives as something else"
        + ("" if own else "; it, its partner, or the way between them"),
        fix="Replace the machine"
        if own
        else "Replace its partner where that one is to be isolated; else `elastic doctor --full` "
        "on both, and try with more machines to learn which it is",
    )


def _of_ways(
    measured: Sequence[Measured], bad: set[str], best: Mapping[str, float], usual: float
) -> Iterator[Finding]:
    """Pairs that do worse together than each of them with others."""
    for one in measured:
        well = all(best[machine] >= SLOW * usual and best[machine] for machine in one.pair)
        if not well or bad & {*one.pair} or one.bytes_per_s >= SLOW * usual:
            continue
        failed = not one.bytes_per_s
        yield Finding(
            check=CHECK,
            node=" - ".join(one.pair),
            result=f"failed: {one.trouble}"
            if failed
            else f"bus {three_digits(one.bytes_per_s / 1e9)} GB/s",
            severity="RESET" if failed else "MONITOR",
            meaning="the way between these two; each does well with others",
            fix="Look at the route and the placement group of the two; try again",
        )
