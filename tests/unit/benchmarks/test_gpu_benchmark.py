"""What `benchmarks.gpu` reckons with."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks._gpu_models import Workload
from benchmarks.gpu import plan_rows, plan_turns, plan_workloads, summarise

TINY = Workload(size="tiny", seq_len=32, samples=4, micro=2, device="cpu")


def test_each_round_begins_with_another_system() -> None:
    assert plan_turns(["a", "b", "c"], 2) == [["a", "b", "c"], ["b", "c", "a"]]


def test_all_workloads_of_a_part_have_as_many_tokens() -> None:
    works = plan_workloads(2, "cuda", tiny=False)
    assert [(work.size, work.seq_len) for work in works] == [("3B", 4096), ("3B", 8192)]
    assert {work.tokens for work in works} == {32768}
    assert {work.micro * work.seq_len for work in works} == {8192}


def test_medians_are_over_the_steps_of_all_rounds() -> None:
    runs = [
        {"step_s": [1.0, 2.0], "peak_bytes": 5, "loss": 3.0},
        {"step_s": [2.0, 4.0, 4.0], "peak_bytes": 7, "loss": 2.0},
    ]
    found = summarise(runs, TINY, {"6N": 1e12})
    assert found["step_ms"] == 2000.0
    assert found["tokens_per_s"] == found["tflops (6N)"] == 64.0
    assert (found["peak_bytes"], found["loss"], found["rounds"]) == (7, 2.0, 2)


def test_a_system_that_never_ran_says_why() -> None:
    assert summarise([{"skipped": "out of memory"}], TINY, {}) == {"skipped": "out of memory"}


@pytest.mark.parametrize("part", [1, 6])
def test_the_rows_of_a_tiny_model_use_all_that_the_others_use(part: int) -> None:
    def used(rows: dict[str, tuple[str, dict[str, Any]]]) -> set[str]:
        return {word for system, changes in rows.values() for word in (system, *changes)}

    whole, tiny = (plan_rows(part, "cpu", tiny=tiny) for tiny in (False, True))
    assert used(tiny) == used(whole)
    assert len(tiny) < len(whole)
