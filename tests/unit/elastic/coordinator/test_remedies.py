"""From signs and losses to the rung of the ladder that is taken, with the coordinator's real parts
round it; only Ray and the agents are stand-ins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.coordinator import remedies, replacements
from elastic.coordinator.aside import Aside
from elastic.coordinator.remedies import Remedies, decide_seats
from elastic.coordinator.replacements import Replacements
from elastic.protocol import events
from elastic.protocol.causes import CORRUPTION, CRASH, USER_ERROR, Cause
from elastic.providers.node_provider import NodeIdentity
from elastic.providers.ray_nodes import RayProvider
from elastic.reporting.event_log import read_events
from elastic.reporting.suspect_file import SuspectFile
from health.suspects import REBOOTED, REBOOTED_WEIGHT, Mark
from health.verdict import Sign, Verdict
from tests.support.coordinator_desk import CoordinatorDesk

PATIENCE_S = 10.0

XID = Sign(
    name="xid_79",
    source="log",
    role="root",
    cause="gpu_error",
    subject="gpu",
    detail="GPU has fallen off the bus",
    node="B",
    remedy="reboot",
)
GPU_LOST = replace(XID, name="gpu_lost", source="reading", decisive=True)
ECC = replace(XID, name="ecc_uncorrected", source="reading", remedy="reset_gpu", detail="3 errors")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Minutes as hundredths of a second. The dispatcher puts the collector off for longer."""
    monkeypatch.setattr(remedies, "SETTLE_S", 0.02)
    monkeypatch.setattr(remedies, "GATHER_S", 0.01)
    for name in ("SETTLE_S", "LOOK_S", "LEAVE_S", "FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(replacements, name, 0.01)
    yield


class Reboots(RayProvider):
    """Its machines can be rebooted."""

    def __init__(self, ended: list[str]) -> None:
        super().__init__(ended.append)
        self.rebooted: list[str] = []

    def reboot(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str | None:
        self.rebooted.extend(node.node for node in nodes)
        return "it was rebooted"


class Refuses(RayProvider):
    """It may replace nothing."""

    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        raise PermissionError("no rights")


async def _written(node: str) -> None:
    """Nothing is being saved."""


class Desk(CoordinatorDesk):
    """Workers a, b and c of a roster on nodes A, B and C, and `spares` on those that they are named
    after."""

    def __init__(
        self,
        root: Path,
        *,
        spares: Sequence[str] = (),
        tells: bool = False,
        reboots: bool = False,
        refuses: bool = False,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(root / "run", spares=spares)
        self.ended: list[str] = []
        self.file = SuspectFile(root)
        self.provider = Reboots(self.ended) if reboots else RayProvider(self.ended.append)
        if refuses:
            self.provider = Refuses(self.ended.append)
        aside = Aside(self.membership, self.dispatcher)
        self.replacements = Replacements(
            self.config,
            self.workers,
            self.records,
            aside,
            _written,
            provider=None if tells else self.provider,
            find=lambda node: NodeIdentity(node=node, address="10.0.0.1", instance=f"m-{node}"),
            live=lambda: ["A", "B", "C"],
            drain=lambda node, deadline_s, reason: None,
        )
        self.remedies = Remedies(
            self.membership, self.dispatcher, self.workers, self.records, self.replacements, aside
        )

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        async def tell() -> None:
            self._join_all()
            told = asyncio.ensure_future(story())
            self._own = asyncio.all_tasks()
            await asyncio.wait_for(told, PATIENCE_S)
            self.records.end("finished", None).result()
            await self.dispatcher.advance()
            await self.dispatcher.tell()  # whoever waits ends

        asyncio.run(tell())

    def _join_all(self) -> None:
        for worker, identity in self.workers.started.items():
            self.records.note(
                events.WorkerJoined(
                    time=time.time(), worker=worker, node=identity.node, pid=1, born_ticks=None
                )
            )

    def shows(self, node: str, *signs: Sign, ahead_s: float = 0.0) -> None:
        told, now = [replace(sign, node=node).to_json() for sign in signs], time.time() + ahead_s
        self.records.note(events.SignsChanged(time=now, node=node, names=[], signs=told))

    async def lose(self, *workers: str, cause: Cause = CRASH) -> None:
        for worker in workers:
            await self.workers.lose(worker, cause, "as found")

    def met(self) -> list[events.VerdictReached]:
        return self.happened(events.VerdictReached)

    def steps(self) -> list[tuple[str, str]]:
        return [(one.step, one.outcome) for one in self.met()]

    async def until_met(self, *expected: tuple[str, str]) -> list[events.VerdictReached]:
        """Waits for these steps and what became of them, in this order."""
        while self.steps() != list(expected):
            assert len(self.steps()) <= len(expected), self.met()
            await asyncio.sleep(0.005)
        return self.met()

    async def until_replaced(self, *expected: str) -> None:
        """Waits for these outcomes for machines."""
        while [e.outcome for e in self.happened(events.NodeReplacement)] != list(expected):
            assert len(self.happened(events.NodeReplacement)) <= len(expected)
            await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Waits until all that was spawned is done: what is looked at would have been met."""
        while asyncio.all_tasks() - self._own:
            await asyncio.sleep(0.005)


def test_a_gpu_that_is_lost_is_acted_on_at_once_though_nobody_was_lost(tmp_path: Path) -> None:
    desk = Desk(tmp_path, reboots=True)

    async def story() -> None:
        desk.shows("B", GPU_LOST)
        (one,) = await desk.until_met(("reboot", "taken"))
        assert (one.nodes, one.cause, one.confidence) == (["B"], "gpu_error", "certain")
        await desk.until_replaced("begun")
        while "b" not in desk.membership.places.retired:  # it leaves, at a boundary
            await asyncio.sleep(0.005)
        await desk.lose("b")
        await desk.until_replaced("begun", "rebooted")

    desk.run(story)
    assert isinstance(desk.provider, Reboots)
    assert desk.provider.rebooted == ["B"] and desk.ended == []
    (left,) = desk.file.read()["m-B"]
    assert left.cause == "rebooted", "and the next time it is replaced"


def test_a_machine_that_was_rebooted_for_a_fault_is_replaced_the_next_time(tmp_path: Path) -> None:
    desk = Desk(tmp_path, reboots=True)
    mark = Mark(
        time=time.time() - 3600,
        weight=REBOOTED_WEIGHT,
        cause=REBOOTED,
        run="before",
        detail="gpu_error: GPU has fallen off the bus",
    )
    desk.file.add("m-B", mark)

    async def story() -> None:
        await desk.settle()
        assert not desk.happened(events.NodeReplacement), "the mark alone is not enough"
        desk.shows("B", GPU_LOST)
        await desk.until_replaced("begun")
        await desk.lose("b")
        await desk.until_replaced("begun", "replaced")

    desk.run(story)
    assert desk.ended == ["B"]


def test_a_machine_that_nobody_can_reboot_is_replaced(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.shows("B", GPU_LOST)
        await desk.until_replaced("begun")
        await desk.lose("b")
        await desk.until_replaced("begun", "replaced")

    desk.run(story)
    assert desk.ended == ["B"]


def test_the_default_tells_and_does_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tells=True)

    async def story() -> None:
        desk.shows("B", GPU_LOST)
        (one,) = await desk.until_met(("reboot", "told"))
        assert one.detail == 'health.replace_nodes = "tell"'
        await desk.until_replaced("told")
        await desk.lose("a", cause=CRASH)
        await desk.until_met(("reboot", "told"), ("new_process", "told"))

    desk.run(story)
    assert desk.ended == [] and not desk.membership.places.retired
    assert desk.file.read().keys() == {"m-B"}, "the next run knows of it"


def test_lines_of_logs_alone_move_nothing_however_often(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        for _ in range(5):
            desk.shows("B", replace(XID, repeated=True))
            await desk.settle()
            desk.shows("B")
            await desk.settle()

    desk.run(story)
    assert desk.met() == [] and not desk.happened(events.NodeReplacement)


def test_a_weak_reading_acts_when_it_comes_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.shows("B", ECC)
        await desk.settle()
        assert desk.met() == []
        desk.shows("B", ECC)  # it stands on: nothing new
        await desk.settle()
        assert desk.met() == []
        desk.shows("B")
        await desk.settle()
        desk.shows("B", ECC)
        (one,) = await desk.until_met(("reset_gpu", "taken"))
        assert one.confidence == "likely"
        await desk.until_replaced("begun")

    desk.run(story)


@pytest.mark.parametrize("goes", [False, True])
def test_a_reading_that_stands_on_while_its_machine_has_no_worker_does_not_come_again(
    tmp_path: Path, goes: bool
) -> None:
    """Unless it has gone meanwhile."""
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.shows("B", ECC)
        await desk.settle()
        await desk.lose("b", cause=USER_ERROR)
        await desk.until_met(("new_process", "taken"))
        desk.shows("B" if goes else "A")  # what machines show is looked at
        await desk.settle()
        joined = events.WorkerJoined(
            time=time.time(), worker="b2", node="B", pid=2, born_ticks=None
        )
        desk.records.note(joined)
        desk.shows("B", ECC)
        await desk.settle()

    desk.run(story)
    causes = [USER_ERROR, "gpu_error"] if goes else [USER_ERROR]
    assert [one.cause for one in desk.met()] == causes
    assert bool(desk.happened(events.NodeReplacement)) == goes


def test_a_reading_that_stands_on_while_most_machines_show_it_does_not_come_again(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        for told in ([ECC], [ECC], []):
            desk.shows("A" if desk.happened(events.SignsChanged) else "B", *told)
            await desk.settle()

    desk.run(story)
    assert desk.met() == [] and not desk.happened(events.NodeReplacement)


def test_a_peer_that_is_named_on_while_it_names_as_many_is_not_named_again(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    names_b, names_a = (
        replace(ECC, name="efa_unresponsive", cause="link", subject="link", peer=peer, remedy=None)
        for peer in "BA"
    )

    async def story() -> None:
        for node, told in (("B", []), ("A", [names_b]), ("B", [names_a]), ("B", [])):
            desk.shows(node, *told)
            await desk.settle()

    desk.run(story)
    assert desk.met() == [] and not desk.happened(events.NodeReplacement)


def test_a_loss_elsewhere_is_no_second_alarm_of_a_weak_reading(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.shows("B", ECC)
        await desk.settle()
        await desk.lose("a")
        await desk.until_met(("new_process", "taken"))
        await desk.settle()

    desk.run(story)
    (one,) = desk.met()
    assert one.cause == "crash" and not desk.happened(events.NodeReplacement)


def test_what_stands_and_was_met_is_not_met_again_for_a_loss_elsewhere(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.shows("B", replace(GPU_LOST, remedy="new_process"))
        await desk.until_met(("new_process", "taken"))
        await desk.lose("a")
        await desk.settle()

    desk.run(story)
    assert [one.cause for one in desk.met()] == ["gpu_error", "crash"]


def test_a_loss_that_a_standing_reading_explains_is_met_though_that_was_met(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tells=True)

    async def story() -> None:
        desk.shows("B", replace(GPU_LOST, remedy="new_process"))
        await desk.until_met(("new_process", "told"))
        await desk.lose("b")
        await desk.settle()

    desk.run(story)
    assert [(one.cause, one.workers) for one in desk.met()] == [
        ("gpu_error", []),
        ("gpu_error", ["b"]),
    ]


def test_a_loss_is_explained_by_what_was_shown_before_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path, tells=True)

    async def story() -> None:
        desk.shows("B", XID, ahead_s=3600.0)
        await desk.settle()
        await desk.lose("b")
        while not desk.met():
            await asyncio.sleep(0.005)

    desk.run(story)
    assert [(one.cause, one.workers) for one in desk.met()] == [("gpu_error", ["b"])]


def test_two_sources_that_agree_act(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.shows("B", XID, ECC)
        await desk.until_met(("reboot", "taken"))

    desk.run(story)


def test_a_crash_is_met_by_a_new_process_then_another_seat_then_the_end(tmp_path: Path) -> None:
    """Each time with no step in between. It follows the work, so no machine goes for it."""
    desk = Desk(tmp_path, spares=("d", "e", "f"))

    async def story() -> None:
        await desk.lose("a")
        await desk.until_met(("new_process", "taken"))
        await desk.lose("b")
        await desk.until_met(("new_process", "taken"), ("other_seat", "taken"))
        assert desk.workers.shunned_nodes == {"B"}
        await desk.lose("c")
        *_, last = await desk.until_met(
            ("new_process", "taken"), ("other_seat", "taken"), ("stop", "taken")
        )
        assert last.fingerprint == "crash:crash"
        assert desk.membership.stopped is not None
        error = desk.membership.stopped.error
        assert error is not None and error.startswith("crash: as found: it came back")

    desk.run(story)
    assert not desk.happened(events.NodeReplacement)


def test_without_an_idle_worker_elsewhere_nobody_changes_seats(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.lose("a")
        await desk.until_met(("new_process", "taken"))
        await desk.lose("b")
        *_, held = await desk.until_met(("new_process", "taken"), ("other_seat", "held_back"))
        assert held.detail.startswith("2 workers need another seat, and 0 wait on other machines")
        await desk.lose("c")  # what was not tried does not count
        await desk.until_met(
            ("new_process", "taken"), ("other_seat", "held_back"), ("other_seat", "held_back")
        )
        assert desk.membership.stopped is None

    desk.run(story)
    assert not desk.workers.shunned_nodes


def test_a_loss_that_makes_its_machine_suspect_by_itself_is_met_by_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark against it is written long before the loss is judged."""
    monkeypatch.setattr(remedies, "SETTLE_S", 1.0)
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.lose("b", cause=CORRUPTION)
        await desk.until_replaced("begun", "replaced")
        await desk.settle()

    desk.run(story)
    assert desk.met() == [] and desk.ended == ["B"]


def test_where_nothing_is_replaced_all_that_is_due_is_told(tmp_path: Path) -> None:
    """Also what happens on a machine that is suspect."""
    desk = Desk(tmp_path, tells=True)

    async def story() -> None:
        desk.shows("B", GPU_LOST)
        await desk.until_replaced("told")
        await desk.lose("b")
        _, second = await desk.until_met(("reboot", "told"), ("reboot", "told"))
        assert second.workers == ["b"]

    desk.run(story)


def test_a_machine_that_could_not_be_replaced_stays_on_the_ladder(tmp_path: Path) -> None:
    desk = Desk(tmp_path, spares=("d", "d2"), refuses=True)

    async def story() -> None:
        desk.shows("D", GPU_LOST)
        await desk.until_replaced("begun", "failed")
        await desk.lose("d", cause=USER_ERROR)
        await desk.until_met(("reboot", "taken"), ("new_process", "taken"))
        desk.shows("D", GPU_LOST, replace(GPU_LOST, name="disk_lost", cause="node"))
        *_, last = await desk.until_met(
            ("reboot", "taken"), ("new_process", "taken"), ("reboot", "held_back")
        )
        assert last.detail == "m-D was not replaced: PermissionError: no rights"
        assert not last.tried

    desk.run(story)


def test_one_machine_that_is_being_replaced_keeps_no_other_from_its_remedy(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    both = Verdict(cause="hang", workers=("b", "c"), evidence=("they wait",), confidence="likely")

    async def story() -> None:
        desk.shows("B", GPU_LOST)
        await desk.until_replaced("begun")
        await desk.remedies.meet(replace(both, workers=("b",)))
        assert desk.steps() == [("reboot", "taken")], "the machine is seen to already"
        await desk.remedies.meet(both)
        assert desk.steps()[1:] == [("new_process", "taken")]
        while not {"b", "c"} <= desk.membership.places.retired:
            await asyncio.sleep(0.005)

    desk.run(story)


def test_losses_of_spares_are_no_tries(tmp_path: Path) -> None:
    desk = Desk(tmp_path, spares=("d", "e"))

    async def story() -> None:
        for worker in ("d", "e"):
            await desk.lose(worker)
            while len(desk.met()) < (worker == "e") + 1:
                await asyncio.sleep(0.005)
        assert desk.steps() == [("new_process", "taken")] * 2

    desk.run(story)


def test_a_slow_worker_takes_the_same_way_when_it_is_told_of(tmp_path: Path) -> None:
    desk = Desk(tmp_path, spares=("d",))
    slow = Verdict(cause="slow", workers=("b",), evidence=("3 times slower",), confidence="likely")

    async def story() -> None:
        await desk.remedies.meet(slow)
        await desk.until_met(("other_seat", "taken"))
        assert desk.membership.places.retired == {"b"} and desk.workers.shunned_nodes == {"B"}

    desk.run(story)
    (drained,) = desk.happened(events.Draining)
    assert (drained.workers, drained.node, drained.reason) == (["b"], None, "slow: 3 times slower")


def test_a_crash_makes_nobody_slow(tmp_path: Path) -> None:
    """What workers show of waiting is of the time before; whoever measures slowness says so."""
    desk = Desk(tmp_path, spares=("d", "e"))
    little = Sign(
        name="waits_little",
        source="reading",
        role="confirmation",
        cause="slow",
        subject="worker",
        detail="it waits for nobody",
        worker="a",
        node="A",
    )

    async def story() -> None:
        desk.shows("A", little)
        desk.shows("B", replace(little, name="waits_much", worker="b"))
        await desk.settle()
        await desk.lose("b")
        await desk.settle()

    desk.run(story)
    assert [(one.cause, one.workers) for one in desk.met()] == [("crash", ["b"])]
    assert not desk.membership.places.retired and not desk.workers.shunned_nodes


def test_a_slow_machine_is_replaced_where_nobody_waits_for_its_place(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    slow = Verdict(
        cause="slow",
        workers=("b",),
        nodes=("B",),
        evidence=("3 times slower",),
        confidence="likely",
        signs=("straggler",),
    )

    async def story() -> None:
        await desk.remedies.meet(slow)
        await desk.until_met(("replace_node", "taken"))
        while not desk.happened(events.NodeReplacement):
            await asyncio.sleep(0.005)

    desk.run(story)
    begun, *_ = desk.happened(events.NodeReplacement)
    assert (begun.outcome, begun.node, begun.reason) == ("begun", "B", "slow: 3 times slower")


def test_too_many_at_once_are_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacements, "SETTLE_S", 0.5)
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.shows("B", GPU_LOST)
        desk.shows("C", GPU_LOST)
        await desk.until_met(("reboot", "taken"), ("reboot", "taken"))
        await desk.until_replaced("held_back", "held_back")

    desk.run(story)
    assert not desk.membership.places.retired


def test_a_coordinator_started_anew_knows_what_was_tried(tmp_path: Path) -> None:
    before = Desk(tmp_path / "before")

    async def story() -> None:
        await before.lose("a", cause=USER_ERROR)
        await before.until_met(("new_process", "taken"))

    before.run(story)
    desk = Desk(tmp_path / "after")
    desk.remedies.replay(before.met())

    async def goes_on() -> None:
        await desk.lose("a", cause=USER_ERROR)
        await desk.until_met(("stop", "taken"))

    desk.run(goes_on)


def test_what_came_together_is_one_try_after_a_restart_of_the_coordinator_too(
    tmp_path: Path,
) -> None:
    before = Desk(tmp_path / "before", spares=("d",))

    async def story() -> None:
        await before.lose("a", "b")
        await before.until_met(("new_process", "taken"), ("new_process", "taken"))
        await before.lose("d")  # it stops nobody
        await before.until_met(*[("new_process", "taken")] * 2, ("other_seat", "held_back"))

    before.run(story)
    assert [one.tried for one in before.met()] == [True, False, False]
    desk = Desk(tmp_path / "after", spares=("d", "e", "f"))
    desk.remedies.replay(before.met())

    async def goes_on() -> None:
        await desk.lose("a")
        await desk.until_met(("other_seat", "taken"))

    desk.run(goes_on)


def test_what_stands_and_was_met_is_not_met_again_after_a_restart(tmp_path: Path) -> None:
    before = Desk(tmp_path / "before")
    sign = replace(GPU_LOST, remedy="new_process")

    async def story() -> None:
        before.shows("B", sign)
        await before.until_met(("new_process", "taken"))

    before.run(story)
    desk = Desk(tmp_path / "after", spares=("d",))
    desk.remedies.replay(read_events(before.paths.events))

    async def goes_on() -> None:
        desk.shows("B", sign)  # its next agent sees it, too
        desk.shows("C", sign)
        (one,) = await desk.until_met(("other_seat", "taken"))
        assert one.nodes == ["C"]

    desk.run(goes_on)
    assert desk.membership.places.retired == {"c"}


def test_nor_where_its_machine_had_no_worker_at_the_restart(tmp_path: Path) -> None:
    before = Desk(tmp_path / "before")
    sign = replace(GPU_LOST, remedy="new_process")

    async def story() -> None:
        before.shows("B", sign)
        await before.until_met(("new_process", "taken"))
        await before.lose("b", cause=USER_ERROR)
        await before.until_met(("new_process", "taken"), ("new_process", "taken"))

    before.run(story)
    desk = Desk(tmp_path / "after")
    desk.remedies.replay(read_events(before.paths.events))

    async def goes_on() -> None:
        desk.shows("B", sign)  # it has a worker again
        await desk.settle()

    desk.run(goes_on)
    assert desk.met() == []


def test_a_weak_verdict_that_becomes_stronger_while_it_stands_is_met_once(tmp_path: Path) -> None:
    """As of a driver that asks for a reset in three readings running."""
    desk = Desk(tmp_path)
    sign = replace(ECC, remedy="new_process")

    async def story() -> None:
        desk.shows("B", sign)
        await desk.settle()
        assert desk.met() == []
        for repeated in (True, False, True):
            desk.shows("B", replace(sign, repeated=repeated))
            await desk.settle()

    desk.run(story)
    assert desk.steps() == [("new_process", "taken")]


def test_steps_that_were_committed_between_two_losses_begin_anew(tmp_path: Path) -> None:
    """It is looked at what they were when it happened, not when it is judged."""
    desk = Desk(tmp_path, spares=("d",))

    async def story() -> None:
        await desk.lose("a")
        desk.membership.progress.record(7)
        await desk.until_met(("new_process", "taken"))
        await desk.lose("b")
        _, second = await desk.until_met(("new_process", "taken"), ("new_process", "taken"))
        assert second.committed == 8

    desk.run(story)


def test_no_sign_is_remembered_for_ever(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        for ago_s in (900, 600, 0):
            event = events.SignsChanged(time=time.time() - ago_s, node="B", names=["b"], signs=[])
            desk.records.note(event)
            await desk.settle()

    desk.run(story)
    assert len(desk.remedies._facts._told) == 1


@pytest.mark.parametrize(
    ("wanted", "idle", "left", "held"),
    [
        (1, ["D"], {"B"}, False),
        (1, ["B"], {"B"}, True),
        (2, ["D", "B"], {"B"}, True),
        (2, ["D", "D"], {"B"}, False),
        (1, [], set(), True),
    ],
)
def test_seats_are_those_of_idle_workers_on_other_machines(
    wanted: int, idle: list[str], left: set[str], held: bool
) -> None:
    assert (decide_seats(wanted=wanted, idle=idle, left=left) is not None) is held
