"""What `benchmarks.trainer_cpu` reckons with; with a tiny model, that its loops learn alike."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks._turns import check_same
from benchmarks.trainer_cpu import parse_arguments, summarise
from tests.support import ROOT
from tests.support.blocks import block


def test_a_ratio_is_of_the_sums_of_a_round_and_its_median_is_told() -> None:
    alone = [block(1.0, 1.0), block(3.0, 1.0)]
    sharded = [block(2.0, 4.0), block(2.0, 4.0)]
    rounds = [
        {
            "single process": alone,
            "ours, one worker": [block(wall_s, 4.0), block(wall_s, 4.0)],
            "FSDP2": sharded,
            "ours, shard 2": [block(1.0, 2.0), block(3.0, 2.0)],
        }
        for wall_s in (4.0, 2.5, 0.5)
    ]
    found = summarise(rounds, tokens=100, steps=5)
    assert found["vs_single_process"] == pytest.approx(0.8)
    assert found["vs_fsdp2"] == pytest.approx(1.0)
    assert found["cpu_ratio"] == {"vs_single_process": 0.25, "vs_fsdp2": 2.0}
    assert found["spread"] == {"vs_single_process": 1.0, "vs_fsdp2": 0.0}
    assert found["systems"]["FSDP2"] == {"step_ms": 400.0, "tokens_per_s": 250.0}


def test_systems_that_learn_otherwise_are_told() -> None:
    one = block(1.0, 1.0)
    check_same({"plain": [one, one], "ours": [one, replace(one, loss=1.0005)]})
    with pytest.raises(AssertionError, match="do not compute the same"):
        check_same({"plain": [one, one], "ours": [one, replace(one, loss=1.002)]})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rounds", "0"], "use 1 or more"),
        (["--rounds", "1", "--turns", "1"], "2 turns or more"),
        (["--samples", "3"], "2 workers share 3 samples"),
        (["--hidden", "40"], "8 heads of even size do not make 40"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert reason in capsys.readouterr().err


@pytest.mark.soak
def test_the_four_loops_learn_alike() -> None:
    sizes = {"--hidden": 16, "--layers": 1, "--seq-len": 16, "--samples": 2}
    turns = {"--rounds": 1, "--turns": 2, "--block": 2}
    options = [str(word) for pair in {**sizes, **turns}.items() for word in pair]
    command = [sys.executable, "-m", "benchmarks.trainer_cpu", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["tokens_per_step"], found["steps"]) == (32, 4)
    assert found["vs_single_process"] > 0 and found["vs_fsdp2"] > 0
