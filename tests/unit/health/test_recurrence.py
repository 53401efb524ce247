from __future__ import annotations

from dataclasses import replace

import pytest

from health.recurrence import AGAIN_S, Recurrence
from health.verdict import Sign, Verdict

ECC = Sign(
    name="ecc",
    source="reading",
    role="root",
    cause="gpu_error",
    subject="gpu",
    detail="3 errors",
    node="n1",
)
WEAK = Verdict(
    cause="gpu_error", nodes=("n1",), evidence=("3 errors",), confidence="weak", signs=("ecc",)
)


@pytest.mark.parametrize(
    ("times_s", "confidences"),
    [
        ((0.0,), ["weak"]),
        ((0.0, AGAIN_S), ["weak", "likely"]),
        ((0.0, AGAIN_S + 1), ["weak", "weak"]),
        ((0.0, AGAIN_S + 1, AGAIN_S + 2), ["weak", "weak", "likely"]),
    ],
)
def test_a_reading_counts_when_it_comes_again_within_the_window(
    times_s: tuple[float, ...], confidences: list[str]
) -> None:
    seen = Recurrence()
    assert [seen.weigh(WEAK, [ECC], at_s).confidence for at_s in times_s] == confidences


def test_lines_of_logs_stay_weak() -> None:
    seen, line = Recurrence(), replace(ECC, source="log")
    assert [seen.weigh(WEAK, [line], at_s).confidence for at_s in (0, 1, 2)] == ["weak"] * 3


def test_a_reading_counts_beside_lines_and_only_where_the_verdict_is_of_it() -> None:
    line = replace(ECC, source="log")
    seen = Recurrence()
    assert [seen.weigh(WEAK, [line, ECC], at_s).confidence for at_s in (0, 1)] == ["weak", "likely"]
    seen, hot = Recurrence(), replace(ECC, name="hot")
    assert [seen.weigh(WEAK, [line, hot], at_s).confidence for at_s in (0, 1)] == ["weak"] * 2


def test_another_machine_or_another_sign_is_another_matter() -> None:
    seen = Recurrence()
    others = [WEAK, replace(WEAK, nodes=("n2",)), replace(WEAK, cause="node")]
    assert [seen.weigh(one, [ECC], 0.0).confidence for one in others] == ["weak"] * 3


def test_what_is_stronger_stays_as_it_is() -> None:
    certain, seen = replace(WEAK, confidence="certain"), Recurrence()
    assert [seen.weigh(certain, [ECC], at_s) for at_s in (0.0, 1.0)] == [certain] * 2
