"""That the benchmark's figures are what they say, and that they are good."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import diagnosis
from benchmarks._diagnosis_faults import FAULTS, PHASES, RANKS, fault_cases, kinds
from benchmarks._diagnosis_recorded import published_cases, recorded_cases
from benchmarks.diagnosis import is_held_out, is_mistake, run, score

FIGURES = ("precision", "recall", "worker_accuracy")

MISSES = {
    "published.cublas_memory",
    "published.ext4_errors",
    "published.mmu_faults_of_one_gpu",
    "published.nccl_memory",
    "published.oom_of_an_old_kernel",
    "published.sxid_data",
}
"""Published lines that no rule knows; docs/health.md says why."""


def test_all_cases_are_judged_and_nobody_is_evicted_for_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    diagnosis.main([])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for part in (result, result["held_out"]):
        assert all(part[figure] >= 0.99 for figure in FIGURES)
        assert part["false_evictions"] == 0
    assert result["cases"] + result["held_out"]["cases"] == len([*fault_cases(), *recorded_cases()])
    assert result["published"]["cases"] == result["published"]["recorded"] == len(published_cases())
    assert result["published"]["false_evictions"] == 0


def test_every_fault_is_at_every_place_under_a_name_of_its_own() -> None:
    names = [case.name for case in (*fault_cases(), *recorded_cases(), *published_cases())]
    assert len(fault_cases()) == len(FAULTS) * len(PHASES) * len(RANKS) == 144
    assert len(names) == len(set(names))


def test_cases_are_of_one_kind_where_names_and_numbers_alone_differ() -> None:
    one, two = (
        c for c in fault_cases() if c.name in ("sigkill.forward.first", "sigkill.forward.last")
    )
    awaited = next(c for c in fault_cases() if c.name == "sigkill.backward.first")
    assert (kinds([one, two]), kinds([one, awaited])) == (1, 2)
    assert kinds(fault_cases()) == 23, "as docs/health.md says"


def test_about_a_third_is_held_out() -> None:
    cases = [*fault_cases(), *recorded_cases()]
    assert 0.25 < sum(map(is_held_out, cases)) / len(cases) < 0.4


def test_of_the_published_lines_just_those_are_missed_that_the_docs_name() -> None:
    outcomes = map(run, published_cases())
    assert {outcome.case.name for outcome in outcomes if is_mistake(outcome)} == MISSES


def test_mistakes_are_counted() -> None:
    crash = next(case for case in fault_cases() if case.name == "sigkill.forward.middle")
    outcome = run(crash)
    assert not is_mistake(outcome)
    expected = crash.expected

    def figures(**wrong: Any) -> dict[str, object]:
        changed = replace(outcome, case=replace(crash, expected=replace(expected, **wrong)))
        assert is_mistake(changed)
        return score([changed])

    other = figures(cause="hang")
    assert (other["precision"], other["recall"], other["worker_accuracy"]) == (0.0, 0.0, 0.0)
    assert figures(cause=None, spared=frozenset({"w3"}))["false_evictions"] == 1
    assert figures(workers=frozenset({"w4"}))["worker_accuracy"] == 0.0
    assert figures(remedy="reboot")["worker_accuracy"] == 0.0
    missed = replace(outcome, done=[])
    assert is_mistake(missed) and score([missed])["recall"] == 0.0
