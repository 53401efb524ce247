"""Who waits for a machine's checks, for how long, and what follows from them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elastic.coordinator import preflight
from elastic.coordinator.preflight import Preflight
from elastic.doctor.finding import Finding
from elastic.doctor.preflight import decide_isolated
from elastic.protocol.messages import Identity, Report

IDENTITY = Identity(worker="w0", rank=0, node="n1", pid=1)
NEW = Report(identity=IDENTITY)
FAILED = Finding(check="GPU errors", result="0000:53:00: lost", severity="ISOLATE")
NOT_GIVEN = Finding(check="GPUs", result="4 of 8", severity="ISOLATE")
SLOW = Finding(check="clock", result="not synchronised", severity="MONITOR")
WELL = Finding(check="disks", result="room")


class Run:
    """What the gate acts on, written down."""

    def __init__(self) -> None:
        self.drained: list[tuple[str, str]] = []
        self.noted: list[Any] = []

    async def drain_node(self, node: str, left_s: float | None, reason: str) -> None:
        self.drained.append((node, reason))

    def note(self, event: Any) -> None:
        self.noted.append(event)


def gate(run: Run, on: bool = True) -> Preflight:
    return Preflight(on, run, run)  # type: ignore[arg-type]


def test_only_what_is_proven_isolates() -> None:
    assert decide_isolated([WELL, SLOW, NOT_GIVEN]) == ""
    assert decide_isolated([NOT_GIVEN, FAILED]) == "GPU errors: 0000:53:00: lost"


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
