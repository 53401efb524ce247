"""The watch over steps that do not come: who keeps the others is ended, also where no step of a new
roster has come yet."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator import standstill
from elastic.coordinator.link_tests import LinkTests
from elastic.coordinator.standstill import StandstillWatch
from elastic.protocol import events
from elastic.protocol.causes import CRASH
from elastic.protocol.messages import Evidence, Identity
from health.progress import Place
from tests.support.coordinator_desk import CoordinatorDesk
from tests.support.watching import wait_until

LEAST_S, PATIENCE_S = 0.3, 30.0
WAITS = Place(
    mark=9,
    phase="phase reduce of step 5",
    in_phase_s=5.0,
    bound="pace",
    waits=True,
    collectives=0,
    longest_s=0.0,
)
LOOPS = replace(WAITS, phase="phase forward of step 5", waits=False)
IS_SLOW = replace(LOOPS, in_phase_s=0.8 * LEAST_S)


class Agents:
    """Know where the workers are, and which connections fail in each test."""

    def __init__(self) -> None:
        self.known: dict[str, Place | None] = {"a": WAITS, "b": LOOPS, "c": WAITS}
        self.short: list[dict[tuple[str, str], int]] = []
        self.tests = self.looks = 0
        self.recordings: dict[str, str] = {}
        self.log = ""
        self.asked: list[list[str]] = []
        self.paused = False

    def awake_s(self) -> float:
        return 0.0 if self.paused else time.monotonic()

    async def places(self, nodes: Iterable[str]) -> dict[str, Place | None]:
        self.looks += 1
        return self.known

    async def evidence(self, identities: Iterable[Identity]) -> dict[str, Evidence]:
        self.on_evidence()
        self.asked.append([identity.worker for identity in identities])
        return {
            worker: Evidence(
                stacks="it waits", log=self.log, collectives=self.recordings.get(worker, "")
            )
            for worker in self.asked[-1]
        }

    def on_evidence(self) -> None:
        pass

    async def try_links(self, nodes: Iterable[str], bound_s: float) -> dict[tuple[str, str], int]:
        self.tests += 1
        return self.short.pop(0) if self.short else {}


class Desk(CoordinatorDesk):
    """The one with a watch, over the rosters of a coordinator that has seen some steps."""

    def __init__(
        self, root: Path, least_s: float = LEAST_S, *, each: int = 1, least: int = 1
    ) -> None:
        super().__init__(root, each=each, least=least)
        self.doors = Agents()
        agents: Any = self.doors
        self.watch = StandstillWatch(
            least_s,
            PATIENCE_S,
            self.paths.incidents,
            self.membership,
            self.dispatcher,
            self.workers,
            agents,
            LinkTests(self.membership, self.workers, agents, self.records),
            self.aside,
            self._cross_lost,
        )
        self.regroups = self.moves = 0

    async def _cross_lost(self, generation: int, reason: str) -> None:
        self.regroups += 1
        self.membership.roster = replace(self.membership.roster, generation=generation + 1)

    async def called(self, count: int) -> None:
        """Returns when all have been called so often."""
        await asyncio.to_thread(wait_until, lambda: self.regroups >= count, PATIENCE_S)

    async def looked_at(self, count: int) -> None:
        """Returns when so many more looks were taken."""
        looks = self.doors.looks + count
        await asyncio.to_thread(wait_until, lambda: self.doors.looks >= looks, PATIENCE_S)

    async def asked_of_all(self) -> None:
        """Returns when evidence was taken: none is taken again before the next standstill."""
        await asyncio.to_thread(wait_until, lambda: self.doors.asked, PATIENCE_S)

    async def manifest(self, number: str = "001") -> dict[str, Any]:
        """Of an incident's folder, once it is there."""
        path = self.paths.incidents / number / "manifest.json"
        await asyncio.to_thread(wait_until, lambda: path.exists() and path.read_text(), PATIENCE_S)
        return json.loads(path.read_text())

    def steps(self, count: int) -> list[events.StepRecord]:
        """Of an older roster."""
        return [
            events.StepRecord(
                step=step,
                loss=1.0,
                grad_norm=1.0,
                lr=1.0,
                tokens=1,
                time=time.time() + 0.01 * step,
                generation=0,
                replicas=3,
                sample_digests=[],
            )
            for step in range(count)
        ]

    async def stand_still(self, within_s: float) -> None:
        """Some steps, and then none."""
        self.watch.committed(self.steps(5))
        await self.killed(within_s)

    async def stand_still_and_keep(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """As `stand_still`. Returns the facts that are kept."""
        kept: queue.Queue[dict[str, Any]] = queue.Queue()
        monkeypatch.setattr(standstill, "keep_evidence", lambda *_, **facts: kept.put(facts))
        await self.stand_still(PATIENCE_S)
        return await asyncio.to_thread(kept.get, timeout=PATIENCE_S)

    async def killed(self, within_s: float) -> list[str]:
        """Who has been ended, once somebody is."""
        deadline = time.monotonic() + within_s
        while not self.agents.killed and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return self.agents.killed


@pytest.mark.parametrize("anew", [False, True], ids=["a new roster", "a new coordinator"])
def test_the_first_step_of_a_roster_may_stand_still(tmp_path: Path, anew: bool) -> None:
    desk = Desk(tmp_path)

    async def run() -> list[str]:
        if anew:
            desk.watch.replay(desk.steps(5))
            desk.watch.begin()
        else:
            desk.watch.committed(desk.steps(5))
        return await desk.killed(PATIENCE_S)

    assert asyncio.run(run()) == ["b"]
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause) == ("b", "hang")
    assert "it keeps the others: for 5.0 s in phase forward of step 5" in lost.detail


@pytest.mark.parametrize(
    ("begun", "told"),
    [
        pytest.param(
            4, "; b has not begun all_reduce 5 of the replica, in which a waits", id="some"
        ),
        pytest.param(None, "", id="the recordings were not there in time"),
        pytest.param("?", "", id="torch has recorded something else"),
    ],
)
def test_the_verdict_tells_the_collective_in_which_the_worker_has_not_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: object, told: str
) -> None:
    desk = Desk(tmp_path)
    desk.lay_out("a b", "c d", nodes=NODES)
    desk.doors.known = {"a": replace(WAITS, waits=False, collectives=5), "b": LOOPS}
    desk.doors.known |= {"c": WAITS, "d": WAITS}
    if begun is not None:
        desk.doors.recordings = {"a": in_all(4, waits_in=5), "b": in_all(begun)}
    manifest = asyncio.run(desk.stand_still_and_keep(monkeypatch))
    (lost,) = desk.happened(events.WorkerLost)
    assert lost.worker == "b"
    assert lost.detail.endswith(f"and its peers wait in the next{told} (health.progress_timeout_s)")
    in_words = [each["in_words"] for each in manifest["not_arrived"]]
    assert in_words == [told.removeprefix("; ")] * bool(told)


@pytest.mark.parametrize(
    ("most", "first"), [(64, ["b", "a", "c", "d"]), (3, ["b", "a", "c"]), (1, ["b", "a", "c"])]
)
def test_all_are_asked_what_they_do_and_of_many_a_sample_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, first: list[str]
) -> None:
    """The suspect, its mate and others; and two of those again, when it is accused."""
    monkeypatch.setattr(standstill, "_MOST_ASKED", most)
    desk = Desk(tmp_path)
    desk.lay_out("a b", "c d", nodes=NODES)
    desk.doors.known = {"a": WAITS, "b": LOOPS, "c": WAITS, "d": WAITS}
    manifest = asyncio.run(desk.stand_still_and_keep(monkeypatch))
    assert desk.doors.asked == [first, ["b", "a", "c"]]
    groups = manifest["stack_groups"]
    assert (groups["seen"], groups["workers"]) == (len(first), 4)
    assert groups["unread"] == ("b", "a", "c", "d")[: len(first)]


def test_stacks_that_nobody_understands_cost_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("another release of Python")

    monkeypatch.setattr(standstill, "find_stack_groups", fail)
    desk = Desk(tmp_path)
    manifest = asyncio.run(desk.stand_still_and_keep(monkeypatch))
    assert manifest["stack_groups"] == {"seen": 3, "workers": 3}
    assert desk.agents.killed == ["b"] and desk.membership.stopped is None


def in_all(begun: object, waits_in: int | None = None) -> str:
    """A recording of one in the first replica of a roster."""
    entry = {
        "process_group": ["0", "the replica replica/1"],
        "profiling_name": "gloo:all_reduce",
        "is_p2p": False,
        "input_sizes": [[4]],
        "state": "scheduled",
    }
    entries = [{**entry, "collective_seq_id": begun, "retired": True}]
    if waits_in is not None:
        entries.append({**entry, "collective_seq_id": waits_in, "retired": False})
    return json.dumps({"entries": entries})


def test_before_some_steps_are_known_nobody_is_accused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def run() -> list[str]:
        desk.watch.replay(desk.steps(2))
        desk.watch.begin()
        return await desk.killed(5 * LEAST_S)

    assert asyncio.run(run()) == []


def test_while_the_run_was_paused_nobody_has_kept_a_step(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.doors.paused = True
    asyncio.run(desk.stand_still(5 * LEAST_S))
    assert not desk.agents.killed and not desk.doors.looks


def test_whoever_moves_while_evidence_is_taken_is_left_alone(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    def move() -> None:
        desk.doors.known["b"] = replace(LOOPS, mark=LOOPS.mark + desk.moves)
        desk.moves += 1

    desk.doors.on_evidence = move  # type: ignore[method-assign]
    asyncio.run(desk.stand_still(5 * LEAST_S))
    assert desk.moves > 1 and not desk.agents.killed


def test_a_slow_step_leaves_what_was_found_and_accuses_nobody(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.doors.known["b"] = IS_SLOW

    async def run() -> dict[str, Any]:
        desk.watch.committed(desk.steps(5))
        await desk.asked_of_all()
        desk.watch.committed(desk.steps(6)[5:])
        return await desk.manifest()

    manifest = asyncio.run(run())
    assert (manifest["accused"], manifest["resolved"]) == ({}, True)
    assert manifest["suspects"] == {
        "b": "for 0.2 s in phase forward of step 5, where 0.2 s are long"
    }
    assert (manifest["step"], manifest["generation"]) == (5, 1)
    assert manifest["bound_s"] == LEAST_S <= 2 * manifest["no_step_for_s"]
    assert manifest["places"]["b"] == asdict(IS_SLOW)
    assert (manifest["not_arrived"], manifest["failed_links"]) == ([], [])
    assert manifest["files"].keys() == {"a.txt", "b.txt", "c.txt"}
    assert not desk.agents.killed and not desk.happened(events.WorkerLost)


def test_a_step_that_comes_while_agents_are_asked_where_all_are_ends_the_look(
    tmp_path: Path,
) -> None:
    """Evidence would be of workers that train, and the next step would leave it."""
    desk = Desk(tmp_path)
    desk.doors.known["b"] = IS_SLOW
    looks, again = list[tuple[object, int]](), asyncio.Event()

    async def places(nodes: Iterable[str]) -> dict[str, Place | None]:
        looks.append((desk.watch._found, len(desk.doors.asked)))
        if len(looks) == 1:
            desk.watch.committed(desk.steps(6)[5:])
        else:
            again.set()
        return desk.doors.known

    desk.doors.places = places  # type: ignore[method-assign]

    async def run() -> None:
        desk.watch.committed(desk.steps(5))
        await asyncio.wait_for(again.wait(), PATIENCE_S)

    asyncio.run(run())
    assert looks[1] == (None, 0)


def test_all_is_kept_of_whoever_was_suspected_and_of_two_who_were_asked_again(
    tmp_path: Path,
) -> None:
    """Of others what their threads were doing. At first e is suspected, later d."""
    desk = Desk(tmp_path, each=2)
    desk.doors.known = {**dict.fromkeys("abcdef", WAITS), "e": IS_SLOW}
    desk.doors.log = "its last words"

    def move() -> None:
        desk.doors.known |= {"e": WAITS, "d": IS_SLOW}

    desk.doors.on_evidence = move  # type: ignore[method-assign]

    async def run() -> dict[str, Any]:
        desk.watch.committed(desk.steps(5))
        await asyncio.to_thread(wait_until, lambda: len(desk.doors.asked) == 2, PATIENCE_S)
        desk.watch.committed(desk.steps(6)[5:])
        return await desk.manifest()

    manifest = asyncio.run(run())
    assert manifest["suspects"].keys() == {"d", "e"}
    whole = {*desk.doors.asked[1], "e"}
    assert {"d", "e"} < whole < {*"abcdef"}
    assert {name for name in manifest["files"] if name.endswith(".log")} == {
        f"{worker}.log" for worker in whole
    }
    assert {f"{worker}.txt" for worker in "abcdef"} < manifest["files"].keys()


def test_what_was_found_of_whoever_moved_before_its_verdict_is_kept(tmp_path: Path) -> None:
    """Once: with the step that comes then."""
    desk = Desk(tmp_path)

    def move() -> None:
        desk.doors.known["b"] = replace(LOOPS, mark=LOOPS.mark + desk.moves)
        desk.moves += 1

    desk.doors.on_evidence = move  # type: ignore[method-assign]

    async def run() -> dict[str, Any]:
        desk.watch.committed(desk.steps(5))
        await asyncio.to_thread(wait_until, lambda: desk.moves > 2, PATIENCE_S)
        assert not desk.paths.incidents.exists(), "the step has not come"
        desk.watch.committed(desk.steps(6)[5:])
        return await desk.manifest()

    manifest = asyncio.run(run())
    assert (manifest["accused"], manifest["resolved"]) == ({}, True)
    assert manifest["no_step_for_s"] > LEAST_S


@pytest.mark.parametrize("place", [LOOPS, IS_SLOW], ids=["a verdict", "a loss"])
def test_a_standstill_that_ends_in_a_loss_has_not_passed(tmp_path: Path, place: Place) -> None:
    """A verdict's folder has all that was found, and accuses; who crashes has one of its own."""
    desk = Desk(tmp_path)
    desk.doors.known["b"] = place

    async def run() -> None:
        desk.watch.committed(desk.steps(5))
        await desk.asked_of_all()
        if place is LOOPS:
            assert await desk.killed(PATIENCE_S) == ["b"]
            assert "resolved" not in await desk.manifest() and desk.watch._found is None
        else:
            await desk.workers.lose("b", CRASH, "its process ended")
        desk.membership.roster = replace(desk.membership.roster, generation=2)
        desk.watch.committed(desk.steps(6)[5:])
        assert desk.watch._found is desk.watch._slow is None

    asyncio.run(run())
    assert len(list(desk.paths.incidents.glob("*"))) == (place is LOOPS)


def test_of_slow_steps_the_first_are_kept_and_the_last_of_them_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standstill, "_MOST_SLOW", 2)
    desk = Desk(tmp_path)
    desk.doors.known["b"] = IS_SLOW

    async def run() -> None:
        desk.watch.committed(desk.steps(20))  # the slow ones make no pace
        for step in range(20, 25):
            assert (step == 23) == ("2 are enough" in caplog.text)
            caplog.clear()
            desk.doors.asked.clear()
            await desk.asked_of_all()
            desk.watch.committed(desk.steps(step + 1)[step:])

    asyncio.run(run())
    assert len(list(desk.paths.incidents.iterdir())) == 2


def test_slow_steps_on_a_storage_that_hangs_take_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what accuses is kept beside. What waited for the storage is kept when it answers."""
    over, kept = threading.Event(), queue.Queue[dict[str, str]]()

    def keep(incidents: Path, accused: dict[str, str], *_: object, **__: object) -> None:
        kept.put(accused)
        assert accused or over.wait(PATIENCE_S)

    monkeypatch.setattr(standstill, "keep_evidence", keep)
    desk = Desk(tmp_path)
    desk.doors.known["b"] = IS_SLOW

    async def run() -> None:
        desk.watch.committed(desk.steps(20))
        for step in range(20, 24):
            desk.doors.asked.clear()
            await desk.asked_of_all()
            desk.watch.committed(desk.steps(step + 1)[step:])
        desk.doors.known["b"] = LOOPS
        assert await desk.killed(PATIENCE_S) == ["b"]
        assert await asyncio.to_thread(kept.get, timeout=PATIENCE_S) == {}
        assert "b" in await asyncio.to_thread(kept.get, timeout=PATIENCE_S)
        desk.membership.roster = replace(desk.membership.roster, generation=2)
        over.set()
        assert await asyncio.to_thread(kept.get, timeout=PATIENCE_S) == {}, "of the second step"

    asyncio.run(run())


def test_a_storage_that_hangs_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(standstill, "keep_evidence", lambda *_, **__: over.wait(PATIENCE_S))
    desk = Desk(tmp_path)

    async def run() -> None:
        await desk.stand_still(PATIENCE_S)
        over.set()

    asyncio.run(run())
    assert desk.agents.killed == ["b"]


def test_who_comes_back_last_from_what_was_shared_is_not_killed_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path, least_s := 2.0)
    desk.doors.known |= {"a": LOOPS}

    async def run() -> float:
        desk.watch.committed(desk.steps(5))
        assert await desk.killed(least_s + 1.0) == [], "most stand still"
        desk.doors.known["a"] = WAITS
        begun = time.monotonic()
        assert await desk.killed(PATIENCE_S) == ["b"]
        return time.monotonic() - begun

    assert asyncio.run(run()) > least_s - 0.5


NODES = {"a": "A", "b": "B", "c": "C", "d": "D"}
HOLE = {("A", "B"): 64, ("C", "B"): 64, ("D", "B"): 64}
ELSEWHERE = {("C", "D"): 64}


def stand_still(
    root: Path, short: list[dict[tuple[str, str], int]], stuck: str, within_s: float
) -> tuple[Desk, dict[str, str]]:
    """Two replicas of two workers, of whom those of `stuck` wait inside their replicas. Returns who
    was lost for what, too."""
    desk = Desk(root)
    desk.lay_out("a b", "c d", nodes=NODES)
    desk.doors.known = {worker: LOOPS if worker in stuck else WAITS for worker in NODES}
    desk.doors.short = list(short)

    async def run() -> None:
        await desk.stand_still(within_s)
        deadline = time.monotonic() + PATIENCE_S
        while desk.agents.killed and not desk.paths.incidents.exists():
            assert time.monotonic() < deadline, "no evidence is kept"
            await asyncio.sleep(0.05)

    asyncio.run(run())
    return desk, {event.worker: event.cause for event in desk.happened(events.WorkerLost)}


@pytest.mark.parametrize(
    ("short", "expected"),
    [
        ([HOLE, HOLE], {"b": "link"}),
        ([HOLE, {}], {"a": "hang", "b": "hang"}),  # it has passed by the time of the verdict
        ([], {"a": "hang", "b": "hang"}),
        ([ELSEWHERE, ELSEWHERE], {"a": "hang", "b": "hang"}),
    ],
)
def test_connections_that_fail_name_one_of_those_who_wait(
    tmp_path: Path, short: list[dict[tuple[str, str], int]], expected: dict[str, str]
) -> None:
    """Nothing tells a and b apart; others explain nothing of it."""
    _, lost = stand_still(tmp_path, short, "ab", PATIENCE_S)
    assert lost == expected


def test_a_loss_in_the_last_look_before_the_verdict_explains_it(tmp_path: Path) -> None:
    """Whose connections had failed was no member any more, and the run ended with a KeyError."""
    desk = Desk(tmp_path, each=2)
    desk.doors.known = {w: LOOPS if w in "ab" else WAITS for w in "abcdef"}
    desk.doors.short = [HOLE, HOLE]
    lost = asyncio.Event()

    async def places(nodes: Iterable[str]) -> dict[str, Place | None]:
        if desk.doors.tests == 2:  # the verdict is due
            await desk.workers.lose("b", CRASH, "its process ended")
            lost.set()
        return desk.doors.known

    desk.doors.places = places  # type: ignore[method-assign]

    async def run() -> None:
        desk.watch.committed(desk.steps(5))
        await asyncio.wait_for(lost.wait(), PATIENCE_S)
        for _ in range(10):  # what follows waits for nothing
            await asyncio.sleep(0)

    asyncio.run(run())
    assert desk.membership.stopped is None
    assert [event.worker for event in desk.happened(events.WorkerLost)] == ["b"]
    assert desk.happened(events.LinksTested) == [] and not desk.paths.incidents.exists()


@pytest.mark.parametrize(
    ("short", "expected"), [([HOLE, HOLE], {"b": "link"}), ([], {}), ([HOLE, {}], {})]
)
def test_where_most_stand_still_connections_alone_accuse(
    tmp_path: Path, short: list[dict[tuple[str, str], int]], expected: dict[str, str]
) -> None:
    """All of the only replicas wait inside themselves, as for a storage that does not answer."""
    desk, lost = stand_still(tmp_path, short, "abcd", 10 * LEAST_S)
    assert lost == expected
    assert (desk.doors.tests, desk.regroups) == (max(1, len(short)), 0), "once is enough"
    assert desk.paths.incidents.exists() == bool(expected)


def test_all_that_wait_for_each_other_are_called_to_regroup(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.doors.known = {"a": WAITS, "b": WAITS, "c": WAITS}

    asyncio.run(desk.stand_still(4 * LEAST_S))
    assert desk.regroups > 0
    assert desk.happened(events.WorkerLost) == []


def test_who_waits_in_a_collective_that_is_slow_for_good_is_called_once(tmp_path: Path) -> None:
    """And has longer until a step comes within the bound again."""
    desk = Desk(tmp_path, least_s := 1.0)
    desk.doors.known = dict.fromkeys("abc", replace(WAITS, in_phase_s=1.25 * least_s))

    async def run() -> None:
        desk.watch.committed(desk.steps(5))
        await desk.called(1)
        await desk.looked_at(5)
        assert desk.regroups == 1
        desk.watch.committed(desk.steps(6)[5:])
        await desk.looked_at(5)
        assert desk.regroups == 1, "that step was late, and so is the next"
        for step in (6, 7):
            desk.watch.committed(desk.steps(step + 1)[step:])
        await desk.called(2)

    asyncio.run(run())


def test_where_connections_fail_all_are_called_as_soon_each_time(tmp_path: Path) -> None:
    """Nobody can be taken out."""
    desk = Desk(tmp_path, least_s := 1.0, least=3)
    desk.doors.short = [HOLE] * 6
    call = desk.watch._cross_lost

    def wait_for(seconds: float) -> None:
        desk.doors.known = dict.fromkeys("abc", replace(WAITS, in_phase_s=seconds))

    async def cross_lost(generation: int, reason: str) -> None:
        await call(generation, reason)
        wait_for(0.8 * least_s)

    desk.watch._cross_lost = cross_lost
    desk.doors.on_evidence = lambda: wait_for(1.25 * least_s)  # type: ignore[method-assign]
    wait_for(0.8 * least_s)

    async def run() -> None:
        desk.watch.committed(desk.steps(5))
        await desk.called(3)

    asyncio.run(run())
    assert not desk.doors.short and not desk.happened(events.WorkerLost)
