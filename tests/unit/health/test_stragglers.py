"""Who is slow and stays so: told from slow samples, wanderers, long samples and slow steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from health.pace import LEAST_S, LEAST_STEPS, Pace, PaceWindow
from health.stragglers import ROUNDS, Blame, count_rounds, find_blame, find_slow

NORMAL = Pace(
    number=1,
    step_s=1.2,
    micro_batches=4.0,
    tokens=1000.0,
    data_s=0.01,
    read_s=0.02,
    compute_s=0.2,
    optimizer_s=0.1,
)


def crew(count: int = 8, **changed: Pace) -> dict[str, Pace]:
    return {f"w{index}": NORMAL for index in range(count)} | changed


def times(factor: float, pace: Pace = NORMAL) -> Pace:
    """A pace that is slower by `factor`, in a step that waits for it."""
    return replace(
        pace,
        step_s=pace.step_s * max(1.0, factor),
        data_s=factor * pace.data_s,
        read_s=factor * pace.read_s,
        compute_s=factor * pace.compute_s,
        optimizer_s=factor * pace.optimizer_s,
    )


def test_a_worker_at_a_third_of_the_others_pace_is_slow_and_no_other() -> None:
    (slow,) = find_slow(crew(w5=times(3.0))).items()
    assert slow[0] == "w5"
    assert slow[1].score == pytest.approx(1 / 3)
    assert slow[1].part == "compute"
    # 3 x (4 x (0.01 + 0.2) + 0.1)
    assert slow[1].evidence == (
        "its own part of a step takes 2.82 s, at the others' pace 0.94 s; "
        "in forward and backward it loses 1.6 s"
    )


@pytest.mark.parametrize(("factor", "slow"), [(1.3, False), (1.4, True)])
def test_the_bound_is_three_quarters(factor: float, slow: bool) -> None:
    assert bool(find_slow(crew(w0=times(factor)))) is slow


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("data", {"data_s": 0.5, "read_s": 0.6}),
        ("compute", {"compute_s": 0.5}),
        ("optimizer", {"optimizer_s": 2.0}),
    ],
)
def test_the_part_that_it_loses_in_is_named(part: str, changed: dict[str, Any]) -> None:
    found = find_slow(crew(w1=replace(NORMAL, step_s=3.0, **changed)))
    assert found["w1"].part == part


def test_in_a_run_that_waits_for_its_slowest_reader_a_little_slower_is_not_slow() -> None:
    """The others find all that they take read already."""
    bound = replace(NORMAL, step_s=2.1, data_s=0.0, read_s=0.5)
    little = replace(bound, data_s=0.31, read_s=0.55)
    assert find_slow(crew(8, **{f"w{i}": bound for i in range(7)}, w7=little)) == {}
    much = replace(little, step_s=6.3, data_s=1.3, read_s=1.5)
    found = find_slow(crew(8, **{f"w{i}": bound for i in range(7)}, w7=much))
    assert [(worker, slow.part) for worker, slow in found.items()] == [("w7", "data")]


@pytest.mark.parametrize(
    "paces",
    [
        {},
        crew(1),
        {name: times(3.0) for name in crew()},
        crew(4, w0=times(3.0), w1=times(3.0), w2=times(3.0)),
        crew(w0=replace(NORMAL, micro_batches=8.0)),  # more lanes than the others
        crew(w0=replace(NORMAL, micro_batches=1.0)),  # the optimizer counts more
        crew(w0=replace(NORMAL, tokens=4000.0, compute_s=0.8, data_s=0.04, read_s=0.08)),
        crew(w0=replace(NORMAL, tokens=250.0)),  # as long, with fewer targets
        crew(w0=replace(NORMAL, data_s=0.03, read_s=0.06, step_s=3.0)),
        crew(w0=times(0.0)),
        {w: times(0.001, p) for w, p in crew(w0=times(3.0)).items()},  # of no account in 1.2 s
        # 0.2 s of 1.2 s, of which it loses 0.1 s.
        {w: times(0.1, p) for w, p in crew(w0=replace(times(2.1), step_s=1.2)).items()},
    ],
    ids=[
        "nobody",
        "alone",
        "all",
        "most",
        "more lanes",
        "fewer lanes",
        "longer samples",
        "fewer targets",
        "not felt",
        "nothing measured",
        "next to nothing",
        "less than is felt",
    ],
)
def test_who_is_not_slow(paces: Mapping[str, Pace]) -> None:
    assert find_slow(paces) == {}


def test_of_two_the_slower_one_is_slow_and_half_of_four_are() -> None:
    assert set(find_slow({"a": NORMAL, "b": times(3.0)})) == {"b"}
    assert set(find_slow(crew(4, w2=times(3.0), w3=times(3.0)))) == {"w2", "w3"}


def test_longer_samples_do_not_hide_a_slow_worker() -> None:
    longer = replace(NORMAL, tokens=2000.0, compute_s=0.4, data_s=0.02, read_s=0.04)
    assert set(find_slow(crew(w0=longer, w1=times(2.0, longer)))) == {"w1"}


# -- rounds ----------------------------------------------------------------------------------------

WORKERS, STEP_S = 8, 0.5
Draw = Callable[[random.Random, int, int], float]
"""How many times as long as usual worker w takes in step s."""


def stragglers(draw: Draw, *, steps: int, seed: int = 1) -> set[str]:
    """Whom a run with such steps finds, with the workers' real windows."""
    rng, windows = random.Random(seed), [PaceWindow() for _ in range(WORKERS)]
    rounds: dict[str, int] = {}
    found: set[str] = set()
    latest: dict[str, Pace] = {}
    for step in range(steps):
        factors = [draw(rng, worker, step) * rng.uniform(0.95, 1.05) for worker in range(WORKERS)]
        for worker, factor in enumerate(factors):
            pace = windows[worker].add(
                step_s=STEP_S * max(factors),
                micro_batches=2,
                tokens=2048,
                data_s=0.05 * STEP_S,
                read_s=0.04 * STEP_S,
                compute_s=0.8 * STEP_S * factor,
                optimizer_s=0.05 * STEP_S,
            )
            if pace is not None:
                latest[f"w{worker}"] = pace
        if len(latest) == WORKERS:
            rounds, latest = count_rounds(rounds, find_slow(latest)), {}
            found |= {worker for worker, count in rounds.items() if count >= ROUNDS}
    return found


def test_a_worker_that_goes_slow_is_found_after_five_rounds() -> None:
    def slow_from_100(rng: random.Random, worker: int, step: int) -> float:
        return 3.0 if worker == 3 and step >= 100 else 1.0

    assert stragglers(slow_from_100, steps=1000) == {"w3"}
    assert stragglers(slow_from_100, steps=100 + LEAST_STEPS * (ROUNDS - 1)) == set()
    assert stragglers(slow_from_100, steps=100 + LEAST_STEPS * (ROUNDS + 1)) == {"w3"}


HARMLESS: Sequence[tuple[str, Draw]] = [
    ("nothing", lambda rng, worker, step: 1.0),
    ("5x slow steps", lambda rng, worker, step: 5.0 if rng.random() < 0.05 else 1.0),
    ("5x on one", lambda rng, w, step: 5.0 if w == 2 and rng.random() < 0.2 else 1.0),
    ("a collection", lambda rng, worker, step: 1.5 if step % 7 == worker % 7 else 1.0),
    ("one 20 s step", lambda rng, worker, step: 40.0 if (worker, step) == (4, 500) else 1.0),
    ("a wanderer", lambda rng, worker, step: 3.0 if step // 15 % WORKERS == worker else 1.0),
    ("slow for all", lambda rng, worker, step: 3.0 if step % 1000 > 300 else 1.0),
    ("ten slow steps", lambda rng, w, step: 3.0 if w == 1 and step % 200 < 10 else 1.0),
]


@pytest.mark.parametrize("draw", [d for _, d in HARMLESS], ids=[name for name, _ in HARMLESS])
def test_what_is_no_straggler_is_none_in_10000_steps(draw: Draw) -> None:
    assert stragglers(draw, steps=10_000) == set()


def test_a_window_is_closed_by_steps_and_by_time() -> None:
    def full_after(step_s: float) -> int:
        window, steps = PaceWindow(), 1
        one = {"data_s": 0.0, "read_s": 0.0, "compute_s": 0.1, "optimizer_s": 0.0}
        while window.add(step_s=step_s, micro_batches=1, tokens=1, **one) is None:
            steps += 1
        return steps

    assert full_after(10.0) == LEAST_STEPS
    assert full_after(0.125) == LEAST_S / 0.125


def test_a_window_has_medians_by_micro_batch_and_a_number() -> None:
    window = PaceWindow()
    paces = [
        window.add(
            step_s=1.0,
            micro_batches=2,
            tokens=t,
            data_s=0.2,
            read_s=0.4,
            compute_s=c,
            optimizer_s=0.1,
        )
        for t, c in [(10, 1.0), (10, 1.0), (30, 99.0), (20, 1.2), (20, 1.2)] * 2
    ]
    first = Pace(
        number=1,
        step_s=1.0,
        micro_batches=2,
        tokens=10.0,
        data_s=0.1,
        read_s=0.2,
        compute_s=0.6,
        optimizer_s=0.1,
    )
    assert [pace for pace in paces if pace is not None] == [first, replace(first, number=2)]
    assert (
        window.add(
            step_s=9.0,
            micro_batches=0,
            tokens=0,
            data_s=0.0,
            read_s=0.0,
            compute_s=0.0,
            optimizer_s=0.0,
        )
        is None
    ), "it had no lanes"


# -- machines --------------------------------------------------------------------------------------

NODES = {"a0": "A", "a1": "A", "b0": "B", "b1": "C"}
REPLICAS = [["a0", "a1"], ["b0", "b1"]]


@pytest.mark.parametrize(
    ("stragglers", "blames"),
    [
        (["a1"], [Blame(workers=("a1",), nodes=("A",))]),
        (["a0", "a1"], [Blame(workers=("a0", "a1"), nodes=("A",))]),
        (["b1"], [Blame(workers=("b1",), nodes=("C",))]),
        (["b0", "b1"], [Blame(workers=("b0", "b1"), nodes=())]),
        (
            ["a1", "b1"],
            [Blame(workers=("a1",), nodes=("A",)), Blame(workers=("b1",), nodes=("C",))],
        ),
    ],
)
def test_a_machine_is_blamed_where_it_can_be_told(
    stragglers: list[str], blames: list[Blame]
) -> None:
    assert find_blame(stragglers, stragglers, REPLICAS, 1, NODES) == blames


def test_one_that_comes_a_round_before_its_peers_is_not_blamed_alone() -> None:
    alike = [Blame(workers=("b1",), nodes=())]
    assert find_blame(["b1"], ["b0", "b1"], REPLICAS, 1, NODES) == alike


@pytest.mark.parametrize(
    ("slow", "blames"),
    [
        (["a", "b"], [Blame(workers=("a", "b"), nodes=())]),
        (["b"], [Blame(workers=("b",), nodes=("B",))]),
        (["b", "c"], [Blame(workers=(one,), nodes=(one.upper(),)) for one in "bc"]),
        (["a", "b", "c", "d"], [Blame(workers=("a", "b", "c", "d"), nodes=())]),
    ],
)
def test_those_that_share_samples_wait_for_each_other_within_a_block(
    slow: list[str], blames: list[Blame]
) -> None:
    """On CUDA both are slow then, and their replica's others are not."""
    assert (
        find_blame(slow, slow, [["a", "b", "c", "d"]], 2, {w: w.upper() for w in "abcd"}) == blames
    )
