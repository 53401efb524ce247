"""The checks of a node under load: in turn, told of before each, and none where it has failed."""

from __future__ import annotations

from queue import Queue

import pytest

from elastic.doctor.finding import Finding
from elastic.doctor.machine import Machine
from elastic.doctor.run import CHECKS
from elastic.node import preflight
from elastic.node.preflight import LOADED_BOUND_S, LOADS, check_under_load, start_preflight


def test_loads_follow_each_other_and_one_that_fails_stops_none() -> None:
    happened: list[str] = []

    def sound(machine: Machine) -> Finding:
        happened.append("it does")
        return Finding(check="burn", result="well")

    def raises(machine: Machine) -> Finding:
        raise OSError("no process")

    found = check_under_load(
        lambda check, number, total: happened.append(f"{check} {number} of {total}"),
        {"copies": raises, "burn": sound},
    )
    assert happened == ["copies 1 of 2", "burn 2 of 2", "it does"]
    assert [one.check for one in found] == [*CHECKS, "copies", "burn"]
    assert (found[-2].severity, found[-2].result) == ("MONITOR", "OSError: no process")


def test_a_machine_that_has_failed_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Finding(check="GPU errors", result="0000:53:00: lost", severity="ISOLATE")
    monkeypatch.setattr(preflight, "run_checks", lambda machine: [failed])

    def begin(check: str, number: int, total: int) -> None:
        raise AssertionError(check)

    assert check_under_load(begin) == [failed]


def test_a_machine_that_cannot_be_looked_at_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(storage: object) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr(preflight, "machine_with", raises)
    told: Queue[list[Finding]] = Queue()
    start_preflight(told.put)
    (found,) = told.get(timeout=10)
    assert (found.check, found.severity) == ("machine", "MONITOR")
    assert found.result == "OSError: Input/output error"

    def begin(check: str, number: int, total: int) -> None:
        raise AssertionError(check)

    assert check_under_load(begin) == [found]


def test_it_is_bounded() -> None:
    assert [*LOADS] == ["matrix burn", "host to GPU", "all-reduce in the node"]
    assert LOADED_BOUND_S == 300
