"""What the coordinator makes of paces: rounds of all workers with lanes, one event, evidence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator import slow_watch
from elastic.coordinator.aside import Aside
from elastic.coordinator.slow_watch import SlowWatch
from elastic.protocol import events
from elastic.protocol.messages import Evidence, Identity
from health.pace import Pace
from health.stragglers import ROUNDS
from health.verdict import Verdict
from tests.support.coordinator_desk import CoordinatorDesk

NORMAL = Pace(
    number=0,
    step_s=1.0,
    micro_batches=4.0,
    tokens=1000.0,
    data_s=0.01,
    read_s=0.02,
    compute_s=0.05,
    optimizer_s=0.1,
)
SLOW = replace(NORMAL, compute_s=0.15)


class Agents:
    """Tells evidence, and nothing by itself."""

    def __init__(self) -> None:
        self.pace_followers: list[Any] = []

    async def evidence(self, identities: Iterable[Identity]) -> dict[str, Evidence]:
        return {one.worker: Evidence(stacks=f"stacks of {one.worker}") for one in identities}


class Desk(CoordinatorDesk):
    """The one that paces are told to."""

    def __init__(self, root: Path, *, move: bool = False) -> None:
        super().__init__(root)
        agents: Any = Agents()
        self.watch = SlowWatch(
            self.paths.incidents,
            self.membership,
            self.workers,
            agents,
            self.records,
            Aside(self.membership, self.dispatcher),
            self._meet if move else None,
        )
        self.met: list[Verdict] = []
        self.number = 0

    async def _meet(self, verdict: Verdict) -> None:
        self.met.append(verdict)

    def round(self, *slow: str, of: Iterable[str] = ("a", "b", "c")) -> None:
        """A window of some workers, told by their nodes."""
        self.number += 1
        for worker in of:
            pace = SLOW if worker in slow else NORMAL
            pid = self.workers.started[worker].pid
            self.watch.take(worker.upper(), {pid: replace(pace, number=self.number)})

    @property
    def found(self) -> list[events.StragglersFound]:
        return self.happened(events.StragglersFound)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path)
    yield found
    found.records.end("finished", None).result()


def play(desk: Desk, *rounds: tuple[str, ...], of: Iterable[str] = ("a", "b", "c")) -> None:
    async def told() -> None:
        for slow in rounds:
            desk.round(*slow, of=of)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    asyncio.run(told())


def test_a_straggler_is_told_once_with_its_machine_and_the_evidence(desk: Desk) -> None:
    play(desk, *[("b",)] * (ROUNDS - 1))
    assert desk.found == []
    play(desk, *[("b",)] * 10)
    (found,) = desk.found
    assert (found.workers, found.nodes, found.part) == (["b"], ["B"], "compute")
    assert found.score == pytest.approx(0.34 / 0.74, abs=1e-3)
    (folder,) = desk.paths.incidents.iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["accused"]["b"] in found.detail
    assert manifest["paces"]["b"]["compute_s"] == 0.15 and manifest["paces"]["c"]["node"] == "C"
    assert (folder / "b.txt").read_text() == "stacks of b"
    assert {path.stem for path in folder.glob("*.txt")} == {"a", "b", "c"}


def test_one_that_stays_slow_is_told_again_after_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its verdict counted has faded by then, if nothing was done."""
    desk = Desk(tmp_path, move=True)
    play(desk, *[("b",)] * (ROUNDS + 1))
    assert len(desk.found) == 1
    monkeypatch.setattr(slow_watch, "AGAIN_S", 0.0)
    play(desk, ("b",))
    desk.records.end("finished", None).result()
    assert [(found.workers, found.nodes) for found in desk.found] == [(["b"], ["B"])] * 2
    assert f"slow in {ROUNDS + 2} rounds running" in desk.found[-1].detail
    assert [verdict.workers for verdict in desk.met] == [("b",)] * 2
    assert len(list(desk.paths.incidents.iterdir())) == 1, "evidence is kept once"


def test_slowness_that_stops_or_wanders_begins_anew(desk: Desk) -> None:
    play(desk, *[("b",)] * (ROUNDS - 1), (), *[("b",)] * (ROUNDS - 1), ("c",), ("b",))
    assert desk.found == []


def test_a_worker_with_the_process_number_of_one_that_is_lost_is_known(desk: Desk) -> None:
    play(desk, ())
    started = desk.workers.started
    started["again"] = replace(started.pop("b"), worker="again")
    desk.watch.take("B", {started["again"].pid: replace(SLOW, number=9)})
    assert desk.watch._paces["again"].compute_s == SLOW.compute_s
    assert desk.watch._paces["b"].compute_s == NORMAL.compute_s


def test_a_round_waits_for_all_workers(desk: Desk) -> None:
    play(desk, *[("b",)] * 20, of=("a", "b"))
    assert desk.found == []
    play(desk, *[("b",)] * 20, of=("c",))
    assert desk.found == [], "that was one round"


def test_the_same_window_counts_once(desk: Desk) -> None:
    """Beats tell what is known, again and again."""
    for _ in range(20):
        desk.number = 0
        play(desk, ("b",))
    assert desk.found == []


def test_nothing_is_judged_while_a_replica_heals(desk: Desk) -> None:
    roster = desk.membership.roster
    desk.membership.heals.begin(roster, roster.replicas[2:], holders=("a", "b"))
    play(desk, *[("b",)] * 20)
    assert desk.found == []
    desk.membership.heals.received("c")
    play(desk, *[("b",)] * ROUNDS)
    assert len(desk.found) == 1


def test_nothing_is_judged_while_workers_are_called(desk: Desk) -> None:
    desk.membership.call = "boundary"
    play(desk, *[("b",)] * 20)
    assert desk.found == []
    desk.membership.call = None
    play(desk, *[("b",)] * ROUNDS)
    assert len(desk.found) == 1


def test_processes_that_nobody_knows_are_passed_by(desk: Desk) -> None:
    desk.watch.take("A", {999: SLOW})
    desk.watch.take("Z", {0: SLOW})
    play(desk, *[("b",)] * ROUNDS)
    assert [found.workers for found in desk.found] == [["b"]]


@pytest.mark.parametrize("move", [False, True])
def test_a_verdict_is_handed_in_where_the_run_is_to_act(tmp_path: Path, move: bool) -> None:
    desk = Desk(tmp_path, move=move)
    play(desk, *[("b",)] * ROUNDS)
    desk.records.end("finished", None).result()
    (found,) = desk.found
    assert [(v.cause, v.workers, v.nodes, v.evidence, v.confidence) for v in desk.met] == (
        [("slow", ("b",), ("B",), (found.detail,), "likely")] if move else []
    )
