"""What `benchmarks.overhead` reckons with, and that its systems rest between their turns."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from benchmarks._processes import processes_below
from benchmarks._turns import Gate, Turns
from benchmarks.overhead import ROUND_STEPS, ratios, summarise
from health.process import read_state
from tests.support.blocks import block


def test_a_ratio_is_of_the_sums_of_a_round_and_counts_what_runs_beside() -> None:
    plain = [block(1.0, 2.0), block(3.0, 2.0)]
    found = ratios({"plain": plain, "fast": [block(2.2, 2.0, 0.2), block(2.0, 2.0, 0.2)]})
    assert found["fast"]["wall_ratio"] == pytest.approx(1.05)
    assert found["fast"]["cpu_ratio"] == pytest.approx(1.1)
    assert found["fast"]["beside_cpu_ms"] == pytest.approx(400 / ROUND_STEPS)


def test_a_summary_has_the_wall_ratio_and_what_ours_use_of_a_core() -> None:
    pair = [block(1.0, 2.0), block(1.5, 2.0)]
    fast = [block(1.0, 2.0, 0.5, {"Coordinator": 0.02}), block(1.5, 2.0, 0.5, {"driver": 0.03})]
    exact = [block(3.0, 4.4, 0.5, {"Coordinator": 0.09, "IdleActor": 0.03, "OfRay": 9.0})]
    found = summarise([{"plain": pair, "fast": fast, "exact": exact} for _ in range(3)])
    assert found["ratio"] == pytest.approx(1.2)
    assert found["wall_spread"] == pytest.approx(0.4)
    assert found["beside"]["fast"] == {"Coordinator": 0.008, "driver": 0.012}
    assert found["beside_share"] == 0.02


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
