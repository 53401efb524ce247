"""Pairs of machines, against made-up clusters with bad machines and bad ways in them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.doctor.finding import Finding
from elastic.doctor.pairs import Measured, Pair, count_rounds, judge_pairs, plan_round

USUAL = 10e9


def run(machines: list[str], try_pair: Callable[[Pair], Measured]) -> list[Measured]:
    measured: list[Measured] = []
    for _ in range(count_rounds(len(machines))):
        measured += [try_pair(pair) for pair in plan_round(machines, measured)]
    return measured


def cluster(count: int) -> list[str]:
    return [f"m{number}" for number in range(count)]


def speeds(slow: dict[str, float], rng: random.Random) -> Callable[[Pair], Measured]:
    """A pair is as fast as its slower machine, within 5 %."""

    def try_pair(pair: Pair) -> Measured:
        speed = USUAL * min(slow.get(machine, 1.0) for machine in pair) * rng.uniform(0.95, 1)
        trouble = "" if speed else "no answer in 60 s"
        return Measured(pair=pair, bytes_per_s=speed, trouble=trouble)

    return try_pair


def ills(measured: list[Measured]) -> dict[str, str]:
    found: list[Finding] = judge_pairs(measured)
    return {one.node: one.severity for one in found if one.severity != "OK"}


@pytest.mark.parametrize(
    ("machines", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (5, 4), (8, 3), (64, 6), (1000, 10)]
)
def test_as_many_rounds_as_the_logarithm(machines: int, rounds: int) -> None:
    assert count_rounds(machines) == rounds


@given(st.integers(2, 70), st.integers(0, 2**32))
@example(5, 4)  # the last two of a round had met already
def test_everybody_takes_part_and_meets_others(count: int, seed: int) -> None:
    rng = random.Random(seed)
    machines = cluster(count)
    measured = run(machines, speeds({m: rng.uniform(0.1, 1) for m in machines}, rng))
    taken = Counter(machine for one in measured for machine in one.pair)
    rounds = count_rounds(count)
    assert set(taken) == set(machines)
    assert all(rounds - count % 2 <= taken[m] <= rounds for m in machines)
    if count > 2:
        partners = {m: {p for one in measured if m in one.pair for p in one.pair} for m in machines}
        assert all(len(partners[m] - {m}) >= 2 for m in machines), "one alone tells nothing"


@given(st.integers(4, 64), st.data())
def test_the_slow_and_the_dead_are_named_and_no_others(count: int, data: st.DataObject) -> None:
    """Of up to an eighth of the machines."""
    machines = cluster(count)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    bad = data.draw(st.lists(st.sampled_from(machines), max_size=max(1, count // 8), unique=True))
    slow = {machine: data.draw(st.sampled_from([0.0, 0.3, 0.6])) for machine in bad}
    expected = {m: "MONITOR" if speed else "ISOLATE" for m, speed in slow.items()}
    assert ills(run(machines, speeds(slow, rng))) == expected


def test_of_two_nobody_can_say_which() -> None:
    dead = [Measured(pair=("m0", "m1"), trouble="no answer in 60 s")]
    assert ills(dead) == {"m0": "RESET", "m1": "RESET"}


def test_one_of_three_is_named() -> None:
    assert ills(run(cluster(3), speeds({"m1": 0.0}, random.Random(0)))) == {"m1": "ISOLATE"}


@pytest.mark.parametrize(("share", "severity"), [(0.0, "RESET"), (0.2, "MONITOR")])
def test_a_bad_way_between_two_good_machines(share: float, severity: str) -> None:
    machines = cluster(8)
    well = speeds({}, random.Random(0))
    first = plan_round(machines, [])[0]

    def try_pair(pair: Pair) -> Measured:
        if set(pair) != set(first):
            return well(pair)
        return Measured(pair=pair, bytes_per_s=share * USUAL, trouble="" if share else "lost")

    assert ills(run(machines, try_pair)) == {" - ".join(first): severity}


def falsifies(bad: str, rounds: int) -> Callable[[Pair], Measured]:
    """In its first rounds one machine gets a sum wrong; its speed tells nothing."""
    well, left = speeds({}, random.Random(0)), [rounds]

    def try_pair(pair: Pair) -> Measured:
        if bad not in pair or not left[0]:
            return well(pair)
        left[0] -= 1
        return replace(well(pair), wrong=2)

    return try_pair


def test_wrong_sums_in_one_round_are_told_of_both() -> None:
    measured = run(cluster(8), falsifies("m3", 1))
    (false,) = [one for one in measured if one.wrong]
    assert ills(measured) == dict.fromkeys(false.pair, "RESET")
    found = {one.node: one for one in judge_pairs(measured)}
    partner = next(machine for machine in false.pair if machine != "m3")
    assert found["m3"].result == f"2 wrong sums, in 1 of 3 rounds, with {partner}"


@pytest.mark.parametrize("count", [3, 8, 9])
def test_wrong_sums_in_two_rounds_isolate(count: int) -> None:
    measured = run(cluster(count), falsifies("m1", 2))
    partners = {m for one in measured if one.wrong for m in one.pair} - {"m1"}
    assert len(partners) == 2
    assert ills(measured) == {"m1": "ISOLATE"}, "which explains those of its partners"


def test_who_has_met_two_that_get_sums_wrong_is_not_isolated_for_them() -> None:
    bad = ("m0", "m7")
    well = speeds({}, random.Random(0))
    measured = run(
        cluster(8), lambda pair: replace(well(pair), wrong=int(not {*pair}.isdisjoint(bad)))
    )
    times = Counter(m for one in measured if one.wrong for m in one.pair)
    assert {m for m in times if times[m] == 2} - {*bad}, "one has met both"
    assert ills(measured) == dict.fromkeys(bad, "ISOLATE")


@pytest.mark.parametrize("count", range(4, 10))
def test_no_healthy_machine_is_isolated_for_the_wrong_sums_of_others(count: int) -> None:
    """Whichever are bad, half of them at most: every pair with one of them has wrong sums."""
    machines, well = cluster(count), speeds({}, random.Random(0))
    most = min(3, count // 2)
    for bad in (bad for some in range(most) for bad in combinations(machines, some + 1)):
        measured = run(machines, lambda p: replace(well(p), wrong=len({*p} & {*bad})))  # noqa: B023
        isolated = {m for m, severity in ills(measured).items() if severity == "ISOLATE"}
        assert isolated <= {*bad}, bad
        if len(bad) == 1:
            assert ills(measured) == {bad[0]: "ISOLATE"}


def test_wrong_sums_of_two_machines() -> None:
    false = Measured(pair=("m0", "m1"), bytes_per_s=USUAL, wrong=1)
    assert ills([false]) == {"m0": "RESET", "m1": "RESET"}


def test_a_machine_that_fails_with_everybody_stays_isolated() -> None:
    well = speeds({"m0": 0.0}, random.Random(0))
    measured = run(cluster(4), well)
    first = next(place for place, one in enumerate(measured) if "m0" in one.pair)
    measured[first] = replace(measured[first], wrong=1)
    assert ills(measured) == {"m0": "ISOLATE"}, "which explains that of its partner"


def test_a_machine_that_fails_with_everybody_is_isolated_though_its_partners_had_as_many() -> None:
    well = speeds({"m0": 0.0}, random.Random(0))
    assert ills([replace(one, wrong=1) for one in run(cluster(4), well)])["m0"] == "ISOLATE"
