from __future__ import annotations

import json
from typing import Any

import pytest

from health.suspects import (
    REBOOTED,
    Mark,
    Record,
    add_mark,
    date_back,
    from_json,
    is_suspect,
    score,
    to_json,
)

DAY_S = 86_400.0
NOW = 1_000_000_000.0


def mark(ago_s: float = 0.0, weight: float = 1.0, cause: str = "link") -> Mark:
    return Mark(time=NOW - ago_s, weight=weight, cause=cause, run="r", detail="d")


def test_a_mark_counts_half_after_a_day() -> None:
    assert score([mark()], NOW) == 1.0
    assert score([mark(DAY_S)], NOW) == 0.5
    assert score([mark(3 * DAY_S), mark(DAY_S, 0.5)], NOW) == 0.125 + 0.25
    assert score([mark(-60)], NOW) == 1.0, "a clock that is ahead"


def test_a_verdict_makes_suspect_for_a_day_and_what_is_weak_by_repetition() -> None:
    assert is_suspect([mark(DAY_S)], NOW) and not is_suspect([mark(DAY_S + 1)], NOW)
    weak = [mark(60 * hour, 0.3, "gpu_error") for hour in range(2)]
    assert not is_suspect(weak[:1], NOW) and is_suspect(weak, NOW)


def test_all_workers_of_a_machine_are_lost_with_it_and_count_once() -> None:
    record = add_mark({}, "m", mark(30))
    record = add_mark(record, "m", mark(9, 0.3, "gpu_error"))
    record = add_mark(record, "m", mark(5, 1.0, "node"))
    record = add_mark(record, "m", mark(4, 0.3, "gpu_error"))
    assert [(one.cause, one.weight) for one in record["m"]] == [("link", 1.0), ("node", 1.0)]


def test_a_reboot_is_no_part_of_an_incident() -> None:
    causes = ["gpu_error", REBOOTED, "gpu_error"]
    record: Record = {}
    for ago_s, cause in zip((3, 2, 1), causes, strict=True):
        record = add_mark(record, "m", mark(ago_s, 1.0, cause))
    assert [one.cause for one in record["m"]] == causes


def test_what_is_too_old_is_dropped_of_every_machine() -> None:
    old, young = mark(7 * DAY_S), mark(6 * DAY_S)  # 1/128 and 1/64
    record = add_mark({"old": (old,), "m": (old, young)}, "m", mark())
    assert record == {"m": (young, mark())}


def test_a_record_goes_to_json_and_back() -> None:
    record = {"m": (mark(60), mark()), "n": (mark(5, 0.3),)}
    assert from_json(json.loads(json.dumps(to_json(record)))) == record


def test_a_machine_without_marks_is_none() -> None:
    assert from_json({"machines": {"m": []}}) == {}


@pytest.mark.parametrize(("written_ago_s", "expected_ago_s"), [(60.0, 60.0), (-1e9, 0.0)])
def test_a_mark_that_is_more_than_an_hour_ahead_is_of_when_it_was_written(
    written_ago_s: float, expected_ago_s: float
) -> None:
    """It would stay new until then."""
    record = {"m": (mark(-3600.0), mark(-3601.0), mark(-1e300))}
    then = mark(expected_ago_s)
    expected = {"m": (mark(-3600.0), then, then)}
    assert date_back(record, NOW, NOW - written_ago_s) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "it has no object 'machines'"),
        ({"machines": []}, "it has no object 'machines'"),
        ({"machines": {"m": {}}}, "the marks of m are no list"),
        ({"machines": {"m": [{"time": 1.0}]}}, "a mark of m has not the fields time, weight"),
    ],
)
def test_another_shape_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": "now"},
        {"time": 10**400},
        {"time": -1e300},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"weight": True},
        {"cause": None},
    ],
)
def test_a_value_of_another_type_is_refused(wrong: dict[str, Any]) -> None:
    data = to_json({"m": (mark(),)})
    data["machines"]["m"][0] |= wrong
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} of a mark of m is"):
        from_json(data)
