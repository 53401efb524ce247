"""What `benchmarks.overhead` reckons with, and that its systems rest between their turns."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from benchmarks._processes import processes_below
from benchmarks._turns import Block, Gate, Turns
from benchmarks.overhead import ROUND_STEPS, ratios, summarise
from health.process import read_state


def block(wall_s: float, workers_s: float, beside_s: float = 0.0) -> Block:
    return Block(wall_s=wall_s, workers_cpu_s=workers_s, beside_cpu_s=beside_s, loss=1.0)


def test_a_ratio_is_of_the_sums_of_a_round_and_counts_what_runs_beside() -> None:
    plain = [block(1.0, 2.0), block(3.0, 2.0)]
    found = ratios({"plain": plain, "fast": [block(2.2, 2.0, 0.2), block(2.0, 2.0, 0.2)]})
    assert found["fast"]["wall_ratio"] == pytest.approx(1.05)
    assert found["fast"]["cpu_ratio"] == pytest.approx(1.1)
    assert found["fast"]["beside_cpu_ms"] == pytest.approx(400 / ROUND_STEPS)


@pytest.mark.parametrize(("plain_s", "measure", "ratio"), [(1.01, "wall", 1.2), (1.5, "cpu", 1.1)])
def test_wall_time_counts_where_the_plain_loop_keeps_its_pace(
    plain_s: float, measure: str, ratio: float
) -> None:
    pair = [block(1.0, 2.0), block(plain_s, 2.0)]
    wall_s = 1.0 + plain_s
    found = summarise(
        [{"plain": pair, "fast": pair, "exact": [block(1.2 * wall_s, 4.4)]} for _ in range(3)]
    )
    assert (found["measure"], found["ratio"]) == (measure, pytest.approx(ratio))


def steps(address: str, done: str) -> None:
    """A system of one worker, which notes each of its steps."""
    gate = Gate(address)
    with Path(done).open("ab", buffering=0) as file:
        while True:
            gate.step()
            gate.loss = 6.0, 3
            file.write(b".")


def test_a_system_does_its_block_and_rests(tmp_path: Path) -> None:
    address, done = str(tmp_path / "gate"), tmp_path / "done"
    process = multiprocessing.get_context("spawn").Process(target=steps, args=(address, str(done)))
    with Turns(address, process, 1) as system:
        for number in (1, 2):
            found = system.block(5)
            assert found.loss == 2.0
            assert len(done.read_bytes()) == 5 * number
            (pid,) = processes_below(process.pid)
            while read_state(pid) != "T":  # the signal may be on its way
                time.sleep(0.01)
    assert process.exitcode is not None
