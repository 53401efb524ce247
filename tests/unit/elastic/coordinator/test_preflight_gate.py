"""Who waits for a machine's checks, for how long, and what follows from them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from elastic.coordinator import preflight
from elastic.coordinator.preflight import Preflight
from elastic.doctor.finding import Finding
from elastic.doctor.preflight import decide_isolated
from elastic.protocol.messages import Identity, Report
from elastic.reporting.report import format_checked

IDENTITY = Identity(worker="w0", rank=0, node="n1", pid=1)
NEW = Report(identity=IDENTITY)
FAILED = Finding(check="GPU errors", result="0000:53:00: lost", severity="ISOLATE")
WRONG = Finding(check="matrix burn", result="cpu: 1 of 8 products wrong", severity="ISOLATE")
NOT_GIVEN = Finding(check="GPUs", result="4 of 8", severity="ISOLATE")
SLOW = Finding(check="clock", result="not synchronised", severity="MONITOR")
WELL = Finding(check="disks", result="room")


class Run:
    """What the gate acts on, written down."""

    def __init__(self) -> None:
        self.drained: list[tuple[str, str]] = []
        self.noted: list[Any] = []
        self.working: set[str] = set()
        self.loaded: list[str] = []
        self.ends, self.here = asyncio.Event(), asyncio.Event()
        self.here.set()
        self.finds: list[Finding] | None = [WELL]

    async def drain_node(self, node: str, left_s: float | None, reason: str) -> None:
        self.drained.append((node, reason))

    async def until_here(self, node: str) -> None:
        await self.here.wait()

    def work_on(self, node: str) -> bool:
        return node in self.working

    async def check_under_load(self, node: str) -> list[Finding] | None:
        self.loaded.append(node)
        await self.ends.wait()
        return self.finds

    def note(self, event: Any) -> None:
        self.noted.append(event)


def gate(run: Run, tier: bool | Literal["full"] = True) -> Preflight:
    return Preflight(tier, run, run, run, run.until_here)  # type: ignore[arg-type]


def test_only_what_is_proven_isolates() -> None:
    assert decide_isolated([WELL, SLOW, NOT_GIVEN]) == ""
    assert decide_isolated([NOT_GIVEN, FAILED]) == "GPU errors: 0000:53:00: lost"
    assert decide_isolated([WELL, WRONG]) == "matrix burn: cpu: 1 of 8 products wrong"


def test_a_worker_waits_for_the_checks_of_its_machine() -> None:
    async def run_it() -> None:
        run = Run()
        one = gate(run)
        waiting = asyncio.ensure_future(one.until_checked(NEW))
        await one.take("n2", [WELL])
        await asyncio.sleep(0)
        assert not waiting.done()
        await one.take("n1", [WELL, FAILED])
        await waiting
        await one.until_checked(NEW)
        assert run.drained == [("n1", "preflight: GPU errors: 0000:53:00: lost")]
        (event,) = run.noted
        assert (event.node, event.isolated) == ("n1", "GPU errors: 0000:53:00: lost")
        assert [one["check"] for one in event.findings] == ["GPU errors"]

    asyncio.run(run_it())


@pytest.mark.parametrize(
    ("on", "report"),
    [
        (False, NEW),
        (True, Report(identity=IDENTITY, built=3)),
        (True, Report(identity=IDENTITY, step=0)),
    ],
)
def test_who_does_not_wait(on: bool, report: Report) -> None:
    asyncio.run(asyncio.wait_for(gate(Run(), on).until_checked(report), 5))


def test_a_machine_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "BOUND_S", 0.05)

    async def run_it() -> None:
        run = Run()
        one = gate(run)
        await one.until_checked(NEW)
        monkeypatch.setattr(preflight, "BOUND_S", 1000.0)
        await one.until_checked(NEW)
        await one.take("n1", [FAILED])
        assert run.drained, "what it says later counts"

    asyncio.run(asyncio.wait_for(run_it(), 30))


def test_what_only_slows_is_noted_and_a_whole_machine_is_not() -> None:
    run = Run()
    asyncio.run(gate(run).take("n1", [WELL]))
    assert run.noted == []
    asyncio.run(gate(run).take("n1", [WELL, SLOW]))
    assert run.noted[0].isolated == "" and run.drained == []


def test_a_machine_is_loaded_once_and_whoever_joins_there_waits_for_it() -> None:
    async def run_it() -> None:
        run = Run()
        run.finds = [WELL, WRONG]
        one = gate(run, "full")
        waiting = [asyncio.ensure_future(one.until_checked(NEW)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert run.loaded == ["n1"] and not any(each.done() for each in waiting)
        run.ends.set()
        await asyncio.gather(*waiting)
        assert run.drained == [("n1", "preflight: matrix burn: cpu: 1 of 8 products wrong")]
        await one.until_checked(NEW)
        assert run.loaded == ["n1"]

    asyncio.run(asyncio.wait_for(run_it(), 30))


def test_a_machine_that_was_loaded_before_the_coordinator_was_lost_is_not_loaded_again() -> None:
    """One with spares only shows no other trace of it."""
    run = Run()

    async def run_it() -> None:
        run.ends.set()
        await gate(run, "full").until_checked(NEW)
        anew = gate(run, "full")
        anew.replay(run.noted)
        await anew.until_checked(NEW)

    asyncio.run(run_it())
    assert run.loaded == ["n1"]


def test_a_machine_that_is_well_under_load_is_told_of() -> None:
    run = Run()

    async def run_it() -> None:
        run.ends.set()
        await gate(run, "full").until_checked(NEW)

    asyncio.run(run_it())
    (event,) = run.noted
    assert (event.node, event.findings, event.isolated) == ("n1", [], "") and run.drained == []


def test_a_machine_that_gives_no_answer_under_load_is_told_of_and_has_its_places() -> None:
    run = Run()
    run.finds = None

    async def run_it() -> None:
        run.ends.set()
        await gate(run, "full").until_checked(NEW)

    asyncio.run(run_it())
    (event,) = run.noted
    (silent,) = event.findings
    assert (event.node, event.isolated, run.drained) == ("n1", "", [])
    assert (silent["check"], silent["severity"]) == ("loads", "RESET")
    (line,) = format_checked(event)
    assert line.startswith("node n1: RESET: loads: no answer in 0 s; ")


@pytest.mark.parametrize(
    ("working", "report", "loaded"),
    [
        ({"n1"}, NEW, []),
        (set(), Report(identity=IDENTITY, step=0), []),
        ({"n2"}, NEW, ["n1"]),
    ],
)
def test_nobody_is_slowed_who_works(working: set[str], report: Report, loaded: list[str]) -> None:
    async def run_it() -> list[str]:
        run = Run()
        run.working = working
        run.ends.set()
        await gate(run, "full").until_checked(report)
        assert run.drained == [] and len(run.noted) == len(loaded)
        return run.loaded

    assert asyncio.run(asyncio.wait_for(run_it(), 30)) == loaded
