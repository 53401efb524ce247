"""From a verdict against a machine to its replacement: told, held back, left first, and done."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from elastic.cli.main import main
from elastic.config import HealthConfig
from elastic.coordinator import replacements, suspicions
from elastic.coordinator.aside import Aside
from elastic.coordinator.replacements import Replacements
from elastic.errors import NoCapacityError, ProviderAwayError
from elastic.node_config import KubeNodes, NodesConfig
from elastic.protocol import events
from elastic.protocol.causes import CORRUPTION, CRASH, GPU_ERROR, LINK, NETWORK, NODE, PATH, Cause
from elastic.providers.kube_api import KubeApi
from elastic.providers.kube_nodes import HEALTH_LABEL, REBOOT, REPLACE, KubeProvider
from elastic.providers.node_provider import NodeIdentity, NodeProvider
from elastic.providers.ray_nodes import RayProvider
from elastic.reporting.suspect_file import SuspectFile
from health import breaker, suspects
from health.suspects import REBOOTED, Mark
from tests.support.coordinator_desk import CoordinatorDesk
from tests.support.fakes.kube_server import kube_server

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Minutes as hundredths of a second. The dispatcher puts the collector off for longer than
    these loops last."""
    for name in ("ASK_S", "LONGEST_ASK_S"):
        monkeypatch.setattr(suspicions, name, 0.01)
    for name in ("SETTLE_S", "LOOK_S", "LEAVE_S", "FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(replacements, name, 0.01)
    yield


class Desk(CoordinatorDesk):
    """Workers a, b and c on nodes A, B and C, whose machines are m-A, m-B and m-C."""

    def __init__(
        self,
        root: Path,
        *,
        provider: NodeProvider | None = None,
        per_hour: int = 4,
        begun: Sequence[float] = (),
        head: str = "",
        gone: str = "",
        silent: int = 0,
        tells: bool = False,
        nodes: Literal["tell"] | NodesConfig = "tell",
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        health = HealthConfig(max_replacements_per_hour=per_hour, replace_nodes=nodes)
        super().__init__(root / "run", health=health)
        self._head, self.gone, self._silent = head, gone, silent
        self.alive = ["A", "B", "C"]
        """Those that Ray believes alive."""
        self.ended: list[str] = []
        self.drained: list[str] = []
        self.saving: dict[str, asyncio.Event] = {}
        """Node -> set when what is being saved from it is written."""
        self.awaited: set[str] = set()
        self.file = SuspectFile(root)
        self.aside = Aside(self.membership, self.dispatcher)
        self.replacements = Replacements(
            self.config,
            self.workers,
            self.records,
            self.aside,
            self._written,
            begun=begun,
            provider=provider or (None if tells else RayProvider(self.ended.append)),
            find=self._find,
            live=lambda: self.alive,
            drain=lambda node, deadline_s, reason: self.drained.append(node),
        )

    async def _written(self, node: str) -> None:
        self.awaited.add(node)
        if node in self.saving:
            await self.saving[node].wait()

    def _find(self, node: str) -> NodeIdentity:
        if self._silent > 0:
            self._silent -= 1
            raise ConnectionError("Ray does not answer")
        if node == self.gone:
            raise LookupError(f"Ray knows no node {node}")
        head = node == self._head
        address = f"10.0.0.{ord(node[0])}"  # of a machine, whatever Ray calls its node
        return NodeIdentity(node=node, address=address, instance=f"m-{node}", head=head)

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        async def tell() -> None:
            await asyncio.wait_for(story(), PATIENCE_S)
            self.records.end("finished", None).result()
            await self.dispatcher.advance()
            await self.dispatcher.tell()  # whoever waits ends

        asyncio.run(tell())

    async def lose(self, *workers: str, cause: Cause = CORRUPTION) -> None:
        for worker in workers:
            await self.workers.lose(worker, cause, "as found")

    async def outcomes(self, *expected: str) -> list[events.NodeReplacement]:
        """Waits for these, in this order."""
        while [e.outcome for e in self.told()] != list(expected):
            assert len(self.told()) <= len(expected), self.told()
            await asyncio.sleep(0.005)
        return self.told()

    async def until_it_may_reboot(self) -> None:
        """A reboot of machine B is due, and its only worker leaves."""
        self.replacements.mend("B", "gpu_error", "Xid 95", 1.0, "reboot")
        await self.outcomes("begun")
        await self.lose("b", cause=CRASH)

    def told(self) -> list[events.NodeReplacement]:
        return self.happened(events.NodeReplacement)

    def lose_on(self, node: str, cause: Cause) -> None:
        """One whom nobody else knows."""
        self.records.note(
            events.WorkerLost(
                time=time.time(),
                worker="x",
                node=node,
                pid=1,
                slot=None,
                cause=cause,
                detail="as found",
            )
        )

    def join_from(self, node: str) -> None:
        self.records.note(
            events.WorkerJoined(time=0.0, worker=f"{node}-new", node=node, pid=1, born_ticks=None)
        )


def mark(weight: float = 1.0, *, ago_s: float = 0.0) -> Mark:
    return Mark(
        time=time.time() - ago_s, weight=weight, cause="link", run="before", detail="64 bytes"
    )


@pytest.mark.parametrize("cause", [CORRUPTION, LINK, NODE])
def test_a_machine_at_fault_is_drained_and_replaced(tmp_path: Path, cause: Cause) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.lose("b", cause=cause)
        begun, done = await desk.outcomes("begun", "replaced")
        assert (begun.node, begun.machine, begun.reason) == ("B", "m-B", f"{cause}: as found")
        assert done.detail.startswith("its Ray node was ended")

    desk.run(story)
    assert desk.ended == desk.drained == ["B"] and desk.workers.draining_nodes == {"B"}
    assert desk.file.read() == {}, "there is no such machine any more"


def test_what_a_coordinator_that_was_cut_off_held_against_machines_is_taken_back(
    tmp_path: Path,
) -> None:
    """Where their workers join; what else speaks against them stays."""
    desk, began_s = Desk(tmp_path), time.time() - 60.0
    of_this_run = {"run": "run", "detail": "not heard", "cause": "node", "weight": 1.0}
    for machine, cause in [("m-B", "node"), ("m-C", "node"), ("m-B", "corruption")]:
        told = Mark(**{**of_this_run, "cause": cause, "time": time.time()})  # type: ignore[arg-type]
        desk.file.add(machine, replace(told, time=told.time - 11 * (cause == "node")))
    desk.file.add("m-C", Mark(**of_this_run, time=began_s - 3600))  # type: ignore[arg-type]
    desk.replacements.not_lost({"B", "C"}, began_s)

    async def story() -> None:
        desk.join_from("B")
        (begun,) = await desk.outcomes("begun")
        assert begun.reason == "remembered of run run: corruption: not heard"

    desk.run(story)
    assert [mark.cause for mark in desk.file.read()["m-B"]] == ["corruption"]
    assert len(desk.file.read()["m-C"]) == 2, "nobody has joined there"


def of_this_run(cause: str) -> Mark:
    return Mark(time=time.time(), weight=1.0, cause=cause, run="run", detail="not heard")


@pytest.mark.parametrize("path", ["suspect-nodes.json", ".suspect-nodes.json.lock"])
def test_what_is_remembered_is_looked_up_until_the_storage_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """A directory in the place of a file stands for a storage that refuses. The network was just
    torn, and the coordinator that was cut off has marked every machine."""
    desk = Desk(tmp_path)
    desk.file.add("m-B", of_this_run("node"))
    desk.file.add("m-C", of_this_run("corruption"))
    desk.replacements.not_lost({"B"}, time.time() - 60.0)
    kept = (tmp_path / path).rename(tmp_path / "kept")
    (tmp_path / path).symlink_to(tmp_path)

    async def story() -> None:
        desk.join_from("B")
        if path == desk.file.path.name:
            desk.join_from("C")
        while "node B is looked up again" not in caplog.text:
            await asyncio.sleep(0.005)
        kept.replace(tmp_path / path)  # at once: without the file nothing is remembered
        while "m-B" in desk.file.read():
            await asyncio.sleep(0.005)
        if path == desk.file.path.name:
            (begun,) = await desk.outcomes("begun")
            assert begun.machine == "m-C"

    desk.run(story)


def test_a_wrong_mark_goes_once_its_machine_is_known(tmp_path: Path) -> None:
    desk = Desk(tmp_path, provider=Forgetful(2))
    desk.file.add("i-B", of_this_run("node"))
    desk.replacements.not_lost({"B"}, time.time() - 60.0)

    async def story() -> None:
        desk.join_from("B")
        while desk.file.read():
            await asyncio.sleep(0.005)

    desk.run(story)
    assert desk.told() == []


def test_a_machine_is_not_looked_up_when_its_workers_are_gone_but_when_others_come(
    tmp_path: Path,
) -> None:
    """The clock is a machine that has workers, and is looked up as often."""
    provider = Forgetful(1_000_000)
    desk = Desk(tmp_path, provider=provider)
    desk.file.add("i-B", mark())

    async def until_asked(node: str, times: int) -> None:
        wanted = provider.nodes.count(node) + times
        while provider.nodes.count(node) < wanted:
            await asyncio.sleep(0.005)

    async def story() -> None:
        desk.join_from("B")
        desk.join_from("C")
        await until_asked("B", 2)
        await desk.lose("b", cause=CRASH)
        await until_asked("C", 3)
        asked = provider.nodes.count("B")
        await until_asked("C", 3)
        assert provider.nodes.count("B") == asked and desk.told() == []
        provider.left = 0
        desk.join_from("B")
        begun, _ = await desk.outcomes("begun", "replaced")
        assert begun.machine == "i-B"

    desk.run(story)


def test_a_machine_that_stays_unknown_is_asked_for_ever_more_rarely_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all are where the tag is wrong."""
    monkeypatch.setattr(suspicions, "LONGEST_ASK_S", 0.08)
    desk = Desk(tmp_path, provider=Forgetful(6))
    desk.file.add("i-B", mark())
    waits, pauses = desk.aside.goes_on_for, list[float]()

    def noted(seconds: float) -> Awaitable[bool]:
        pauses.append(seconds)
        return waits(seconds)

    monkeypatch.setattr(desk.aside, "goes_on_for", noted)

    async def story() -> None:
        desk.join_from("B")
        (begun,) = await desk.outcomes("begun")
        assert begun.machine == "i-B"

    desk.run(story)
    assert pauses[:6] == [0.01, 0.02, 0.04, 0.08, 0.08, 0.08]
    assert caplog.text.count("the machine of node B is not known") == 1


@pytest.mark.parametrize("of", ["provider", "ray"])
def test_what_is_remembered_is_looked_up_once_its_machine_is_known(tmp_path: Path, of: str) -> None:
    """One call that failed, as where too many were made, must not make it welcome for the run."""
    provider = Forgetful(2 * (of == "provider"))
    desk = Desk(tmp_path, provider=provider, silent=2 * (of == "ray"))
    desk.file.add("i-B", mark())

    async def story() -> None:
        desk.join_from("B")
        (begun,) = await desk.outcomes("begun")
        assert (begun.machine, begun.reason) == ("i-B", "remembered of run before: link: 64 bytes")

    desk.run(story)
    assert provider.left < 0, "it was asked once more"


def test_of_two_nodes_that_are_lost_at_once_the_machine_that_answers_may_be_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a container ran out of memory, and all its processes were ended."""
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.workers.lose_nodes({"B": "not heard", "C": "not heard"})
        begun, _ = await desk.outcomes("begun", "replaced")
        assert (begun.machine, begun.reason) == ("m-C", "node: not heard")

    desk.agents.answering = {"B"}
    desk.run(story)
    (mark,) = desk.file.read()["m-B"]
    assert (mark.cause, mark.weight) == ("ray_node", 0.3)


def test_what_may_have_been_the_program_needs_to_come_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    before = Mark(
        time=time.time() - 3600, weight=0.3, cause="gpu_error", run="before", detail="Xid 79"
    )
    desk.file.add("m-C", before)

    async def story() -> None:
        await desk.lose("a", cause=CRASH)
        await desk.lose("b", "c", cause=GPU_ERROR)
        await desk.outcomes("begun", "replaced")
        while "m-B" not in desk.file.read():
            await asyncio.sleep(0.005)

    desk.run(story)
    assert desk.ended == ["C"] and desk.file.read().keys() == {"m-B"}


def test_a_machine_whose_efa_is_not_taken_is_replaced_and_not_each_one_that_comes_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is the image that lacks EFA's plugin, the next machine shows the same."""
    monkeypatch.setattr(suspicions, "INCIDENT_S", 0.0)
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.lose("b", cause=NETWORK)
        begun, _ = await desk.outcomes("begun", "replaced")
        assert (begun.machine, begun.reason) == ("m-B", "network: as found")
        await asyncio.sleep(0.001)  # another time
        await desk.lose("c", cause=NETWORK)

    desk.run(story)
    assert desk.ended == ["B"] and not desk.file.read()


def test_what_follows_the_work_with_no_step_in_between_says_nothing_of_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (suspects, suspicions):
        monkeypatch.setattr(module, "INCIDENT_S", 0.0)
    desk = Desk(tmp_path)

    async def story() -> None:
        for node in "BBC":
            desk.lose_on(node, cause=GPU_ERROR)
            await asyncio.sleep(0.001)  # another time
        desk.lose_on("A", cause=PATH)  # whose other end is told from it by its coming again
        while "m-A" not in desk.file.read():
            await asyncio.sleep(0.005)
        assert {machine: len(marks) for machine, marks in desk.file.read().items()} == {
            "m-A": 1,
            "m-B": 1,
        }
        desk.lose_on("A", cause=PATH)
        (begun,) = await desk.outcomes("begun")
        assert begun.machine == "m-A"
        desk.membership.progress.recorded += 1
        desk.lose_on("C", cause=GPU_ERROR)
        while "m-C" not in desk.file.read():
            await asyncio.sleep(0.005)

    desk.run(story)


def test_the_default_tells_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tells=True)

    async def story() -> None:
        await desk.lose("b")
        (told,) = await desk.outcomes("told")
        assert told.detail == 'health.replace_nodes = "tell"; it would be replaced'
        assert told.machine == "m-B"

    desk.run(story)
    assert desk.ended == desk.drained == [] and not desk.workers.draining_nodes
    (remembered,) = desk.file.read()["m-B"]
    assert (remembered.cause, remembered.run, remembered.detail) == (
        "corruption",
        "run",
        "as found",
    )


def test_one_that_was_told_of_is_suspect_until_it_is_cleared(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tells=True)

    async def story() -> None:
        await desk.lose("b", "c")
        await desk.outcomes("told", "told")
        assert main(["nodes", "clear", str(tmp_path), "m-B"]) == 0
        *_, cleared = await desk.outcomes("told", "told", "cleared")
        assert (cleared.node, cleared.machine) == ("B", "m-B")
        desk.replacements.mend("B", "corruption", "again", 1.0, "replace_node")
        await desk.outcomes("told", "told", "cleared", "told")

    desk.run(story)


def test_so_is_one_that_could_not_be_replaced_also_after_a_restart(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.file.add("m-B", mark())
    failed = events.NodeReplacement(
        time=time.time(), node="B", machine="m-B", outcome="failed", reason="link: r", detail="why"
    )
    desk.replacements.replay([failed])

    async def story() -> None:
        desk.replacements.begin()
        assert desk.replacements.why_not(["B"]) == "m-B was not replaced: why"
        desk.file.clear("m-B")
        (cleared,) = await desk.outcomes("cleared")
        assert cleared.reason == "link: r" and desk.replacements.why_not(["B"]) is None

    desk.run(story)


@pytest.mark.parametrize(("ago_s", "gone"), [(300.0, ["C"]), (1000.0, ["B"])])
def test_the_end_of_a_machine_that_is_to_reboot_does_not_speak_against_it(
    tmp_path: Path, ago_s: float, gone: list[str]
) -> None:
    desk = Desk(tmp_path)
    desk.file.add("m-B", replace(mark(0.3, ago_s=ago_s), cause="rebooted"))

    async def story() -> None:
        await desk.lose("b", cause=NODE)
        if gone == ["C"]:
            await desk.lose("c", cause=NODE)
        await desk.outcomes("begun", "replaced")

    desk.run(story)
    assert desk.ended == gone


def test_two_of_three_at_once_are_held_back_until_they_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "SETTLE_S", 0.5)
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.lose("b", "c")
        held = await desk.outcomes("held_back", "held_back")
        assert {e.machine for e in held} == {"m-B", "m-C"}
        assert "2 of 3 machines are suspect at once, more than 20%" in held[-1].detail
        assert desk.ended == []
        assert main(["nodes", "clear", str(tmp_path), "m-B"]) == 0
        # The other one is alone now, and may go.
        all_ = await desk.outcomes("held_back", "held_back", "cleared", "begun", "replaced")
        assert [e.machine for e in all_[2:]] == ["m-B", "m-C", "m-C"]

    desk.run(story)
    assert desk.ended == ["C"]


def test_what_is_settled_holds_nobody_back_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "AT_ONCE_S", 0.0)
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.lose("b")
        await desk.outcomes("begun", "replaced")
        await desk.lose("c")
        await desk.outcomes("begun", "replaced", "begun", "replaced")

    desk.run(story)
    assert desk.ended == ["B", "C"]


def test_one_that_was_replaced_counts_on_from_then_however_long_it_was_held_back(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    now = time.time()
    past: list[tuple[events.ReplacementOutcome, float]]
    past = [("held_back", 2000.0), ("begun", 300.0), ("replaced", 100.0)]
    desk.replacements.replay(
        events.NodeReplacement(
            time=now - ago_s, node="Z", machine="m-Z", outcome=one, reason="", detail=""
        )
        for one, ago_s in past
    )

    async def story() -> None:
        await desk.lose("b")
        await desk.outcomes("held_back")

    desk.run(story)


def test_no_more_than_so_many_an_hour(tmp_path: Path) -> None:
    desk = Desk(tmp_path, per_hour=1, begun=(time.time() - 1800,))

    async def story() -> None:
        desk.replacements.begin()
        await desk.lose("b")
        (held,) = await desk.outcomes("held_back")
        assert "health.max_replacements_per_hour = 1" in held.detail

    desk.run(story)
    assert desk.ended == []


def test_what_waits_for_capacity_is_not_held_back_by_its_own_beginning(tmp_path: Path) -> None:
    """Nor does it begin a second time, after the coordinator was started anew."""
    now = time.time()
    desk = Desk(tmp_path, per_hour=1, begun=(now,))
    desk.file.add("m-B", mark())
    desk.replacements.replay(
        events.NodeReplacement(
            time=now, node="B", machine="m-B", outcome=one, reason="link: r", detail=""
        )
        for one in ("begun", "held_back")
    )

    async def story() -> None:
        desk.replacements.begin()
        await desk.lose("b", cause=CRASH)
        await desk.outcomes("replaced")

    desk.run(story)
    assert desk.ended == ["B"]


def test_a_machine_is_not_ended_while_a_worker_has_a_place_there(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.file.add("m-B", mark())

    async def story() -> None:
        desk.join_from("B")
        (begun,) = await desk.outcomes("begun")
        assert begun.reason == "remembered of run before: link: 64 bytes"
        while desk.drained != ["B"]:
            await asyncio.sleep(0.005)
        assert desk.workers.work_on("B") and desk.ended == []
        assert "b" in desk.membership.places.retired
        await desk.lose("b", cause=CRASH)
        await desk.outcomes("begun", "replaced")

    desk.run(story)
    assert desk.ended == ["B"]
    (drained,) = desk.happened(events.Draining)
    assert (drained.workers, drained.node) == (["b"], "B")


def test_one_that_is_cleared_while_it_is_left_is_not_replaced(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.file.add("m-B", mark())

    async def story() -> None:
        desk.join_from("B")
        await desk.outcomes("begun")
        while desk.drained != ["B"]:
            await asyncio.sleep(0.005)
        assert main(["nodes", "clear", str(tmp_path), "m-B"]) == 0
        _, cleared = await desk.outcomes("begun", "cleared")
        assert cleared.detail.endswith(
            "; nothing is placed there until its Ray node is started anew"
        )
        await desk.lose("b", cause=CRASH)
        await desk.lose("c")
        await desk.outcomes("begun", "cleared", "begun", "replaced")

    desk.run(story)
    assert desk.ended == ["C"]


def test_one_that_cannot_be_left_holds_nobody_back_once_nothing_speaks_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it can be left at last it is replaced: nothing is placed there any more."""
    monkeypatch.setattr(breaker, "AT_ONCE_S", 0.0)
    desk = Desk(tmp_path)
    desk.file.add("m-B", mark(ago_s=86_399.5))  # enough for half a second

    async def story() -> None:
        desk.join_from("B")
        await desk.outcomes("begun")
        await desk.lose("c")
        await desk.outcomes("begun", "held_back", "begun", "replaced")
        assert desk.ended == ["C"]
        await desk.lose("b", cause=CRASH)
        await desk.outcomes("begun", "held_back", "begun", "replaced", "replaced")

    desk.run(story)
    assert desk.ended == ["C", "B"]


def test_what_is_remembered_fades(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.file.add("m-B", mark(ago_s=90_000))
    desk.file.add("m-C", mark())

    async def story() -> None:
        desk.join_from("B")
        desk.join_from("C")
        (begun,) = await desk.outcomes("begun")
        assert begun.machine == "m-C"

    desk.run(story)


class Scarce:
    """A provider without capacity for a while, or one that fails."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.asked = list(errors), 0
        self.replaced: list[str] = []

    def machine_of(self, node: NodeIdentity) -> str:
        return node.name

    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        self.replaced.append(machine)
        return "done"

    def reboot(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str | None:
        return None

    def complaints(self) -> dict[str, str]:
        return {}


def test_without_capacity_it_is_asked_again(tmp_path: Path) -> None:
    provider = Scarce(NoCapacityError("m-B", "no capacity", "Add subnets"))
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.lose("b")
        _, held, done = await desk.outcomes("begun", "held_back", "replaced")
        assert held.detail == "m-B: no capacity. Add subnets. Asked again in 0.01 s"
        assert done.detail == "done"

    desk.run(story)
    assert provider.asked == 2


def test_a_platform_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    """The machine has been left: nobody else would take it out."""
    provider = Scarce(ProviderAwayError("DELETE /pods/b", "HTTP Error 503", "Look at it"))
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.lose("b")
        _, held, done = await desk.outcomes("begun", "held_back", "replaced")
        assert held.detail == ("DELETE /pods/b: HTTP Error 503. Look at it. Asked again in 0.01 s")
        assert done.detail == "done"

    desk.run(story)
    assert provider.asked == 2


class Full(Scarce):
    """Has no other machine for one of them."""

    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        if machine == "m-B":
            raise NoCapacityError(machine, "no capacity", "Add subnets")
        return super().replace(nodes, machine, reason)


def test_one_that_waits_for_capacity_holds_nobody_back_and_can_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "AT_ONCE_S", 0.0)
    provider = Full()
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.lose("b")
        while len(desk.told()) < 2:
            await asyncio.sleep(0.005)
        await desk.lose("c")
        while not provider.replaced:
            await asyncio.sleep(0.005)
        assert main(["nodes", "clear", str(tmp_path), "m-B"]) == 0
        while all(event.outcome != "cleared" for event in desk.told()):  # C may be told of later
            await asyncio.sleep(0.005)

    desk.run(story)
    assert provider.replaced == ["m-C"]
    assert {e.outcome for e in desk.told() if e.node == "B"} == {"begun", "held_back", "cleared"}


def test_a_provider_that_fails_harms_nobody(tmp_path: Path) -> None:
    provider = Scarce(PermissionError("no rights"))
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.lose("b")
        *_, failed = await desk.outcomes("begun", "failed")
        assert failed.detail == "PermissionError: no rights"
        assert desk.membership.stopped is None

    desk.run(story)
    assert provider.asked == 1 and desk.file.read().keys() == {"m-B"}


class Forgetful(Scarce):
    """Does not know its machines at first."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times
        self.nodes: list[str] = []
        """Which it was asked for."""

    def machine_of(self, node: NodeIdentity) -> str:
        self.nodes.append(node.node)
        self.left -= 1
        if self.left >= 0:
            raise LookupError("no instance has this address")
        return f"i-{node.node}"


@pytest.mark.parametrize("times", [1, 2])
def test_a_machine_that_is_not_known_is_asked_for_again_and_not_replaced(
    tmp_path: Path, times: int
) -> None:
    provider = Forgetful(times)
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.lose("b")
        if times == 1:
            begun, _ = await desk.outcomes("begun", "replaced")
            assert begun.machine == "i-B"
        else:
            (failed,) = await desk.outcomes("failed")
            assert failed.detail == "it is not known: LookupError: no instance has this address"

    desk.run(story)
    assert desk.file.read().keys() == (set() if times == 1 else {"m-B"})
    assert provider.asked == (times == 1)


def test_what_goes_over_to_the_name_of_a_machine_keeps_its_time(tmp_path: Path) -> None:
    """By a clock that is behind it seems to come yet. A reboot by this run is known by it, too."""
    desk = Desk(tmp_path, provider=Forgetful(1))
    suspicions, ahead = desk.replacements._suspicions, mark(ago_s=-86_400.0)
    reboot = replace(ahead, cause=REBOOTED, run="run", time=ahead.time + 60.0)
    desk.file.add_all({"m-B": (ahead, reboot)})

    async def story() -> None:
        unknown = await suspicions.machine_of("B")
        assert (unknown.name, unknown.unknown is None) == ("m-B", False)
        assert (await suspicions.ask_again(unknown)).name == "i-B"
        assert desk.file.kept() == {"i-B": (ahead, reboot)}
        assert await suspicions.probation_of("i-B", reboot.time) == "perhaps"

    desk.run(story)


def test_rays_head_is_left_alone(tmp_path: Path) -> None:
    desk = Desk(tmp_path, head="B")

    async def story() -> None:
        await desk.lose("b")
        (failed,) = await desk.outcomes("failed")
        assert failed.detail == "Ray's head is there: the cluster would end"

    desk.run(story)
    assert desk.ended == desk.drained == []


def test_what_is_being_saved_from_a_machine_is_written_before_it_is_replaced(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.saving["B"] = asyncio.Event()
        await desk.lose("b")
        while "B" not in desk.awaited:
            await asyncio.sleep(0.005)
        assert desk.ended == []
        desk.saving["B"].set()
        await desk.outcomes("begun", "replaced")

    desk.run(story)
    assert desk.ended == ["B"]


class Shared(Scarce):
    """B and C are on one machine, as two pods may be."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[str] = []

    def machine_of(self, node: NodeIdentity) -> str:
        return "m-A" if node.node == "A" else "m-BC"

    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        self.nodes.extend(node.node for node in nodes)
        return super().replace(nodes, machine, reason)


def test_all_of_rays_nodes_on_a_machine_are_left_before_it_is_replaced(tmp_path: Path) -> None:
    provider = Shared()
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.lose("b")
        while desk.drained != ["B", "C"]:
            await asyncio.sleep(0.005)
        assert provider.replaced == [] and desk.workers.work_on("C")
        await desk.lose("c", cause=CRASH)
        await desk.outcomes("begun", "replaced")

    desk.run(story)
    assert provider.nodes == ["B", "C"] and provider.replaced == ["m-BC"]


def test_a_machine_that_rays_head_is_on_by_another_node_is_left_alone(tmp_path: Path) -> None:
    provider = Shared()
    desk = Desk(tmp_path, provider=provider, head="C")

    async def story() -> None:
        await desk.lose("b")
        (failed,) = await desk.outcomes("failed")
        assert failed.detail == "Ray's head is there: the cluster would end"

    desk.run(story)
    assert provider.asked == 0 and desk.drained == []


def test_a_machine_that_is_lost_with_two_of_rays_nodes_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "SETTLE_S", 0.5)
    provider = Shared()
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.lose("b", "c", cause=NODE)
        await desk.outcomes("begun", "replaced")

    desk.run(story)
    assert provider.replaced == ["m-BC"]


class SharedAndAway(Shared):
    """It does not answer the first time that it is asked for a node."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_for: set[str] = set()

    def machine_of(self, node: NodeIdentity) -> str:
        if node.node not in self.asked_for:
            self.asked_for.add(node.node)
            raise ConnectionError("too many calls")
        return super().machine_of(node)


def test_so_is_one_whose_name_was_not_known_when_it_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "SETTLE_S", 0.5)
    provider = SharedAndAway()
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.lose("b", "c", cause=NODE)
        while "replaced" not in [e.outcome for e in desk.told()]:
            await asyncio.sleep(0.005)

    desk.run(story)
    assert provider.replaced == ["m-BC"]
    assert [e.outcome for e in desk.told() if e.outcome != "held_back"] == ["begun", "replaced"]


def test_a_record_that_cannot_be_read_does_not_stop_a_verdict(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.file.path.write_text("[]")

    async def story() -> None:
        desk.join_from("C")
        await desk.lose("b")
        await desk.outcomes("begun", "replaced")
        assert desk.membership.stopped is None

    desk.run(story)
    assert desk.ended == ["B"] and desk.file.path.read_text() == "[]"


def test_a_record_that_cannot_be_written_does_not_clear_what_is_held_back(tmp_path: Path) -> None:
    desk = Desk(tmp_path, per_hour=1, begun=(time.time() - 3598.0,))
    (tmp_path / ".suspect-nodes.json.lock").mkdir()  # as where the file system has no locks

    async def story() -> None:
        await desk.lose("b")
        await desk.outcomes("held_back", "begun", "replaced")

    desk.run(story)
    assert desk.ended == ["B"] and not desk.file.path.exists()


@pytest.mark.parametrize("refused", [0, 1])
def test_a_mark_that_was_not_written_counts_and_is_written_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """Of two that are enough together, the storage refuses one."""
    monkeypatch.setattr(suspects, "INCIDENT_S", 0.0)
    desk = Desk(tmp_path, tells=True)
    lock = tmp_path / ".suspect-nodes.json.lock"

    async def accuse(node: str) -> None:
        """Until that is written, or refused."""
        marks, warned = len(marks_of(node)), len(caplog.records)
        desk.replacements.mend(node, "gpu_error", "Xid 95", 0.3, "reboot")
        while len(marks_of(node)) == marks and len(caplog.records) == warned:
            await asyncio.sleep(0.005)

    def marks_of(node: str) -> Sequence[Mark]:
        return desk.file.read().get(f"m-{node}", ())

    async def story() -> None:
        for number in range(2):
            if number == refused:
                lock.unlink(missing_ok=True)
                lock.symlink_to(tmp_path)
            await accuse("B")
            assert lock.is_dir() is (number == refused)
            if number == refused:
                lock.unlink()
        (told,) = await desk.outcomes("told")
        assert told.machine == "m-B"
        await accuse("C")
        assert len(marks_of("B")) == 2 and len(marks_of("C")) == 1

    desk.run(story)
    assert "what speaks against m-B is not remembered yet" in caplog.text


def test_a_mark_of_an_incident_that_was_not_written_counts_once(tmp_path: Path) -> None:
    """The workers of a machine are lost with it, and the storage refuses the second mark."""
    desk = Desk(tmp_path, tells=True)
    desk.file.add("m-B", mark(0.3))
    lock = tmp_path / ".suspect-nodes.json.lock"
    lock.unlink()
    lock.symlink_to(tmp_path)

    async def story() -> None:
        desk.replacements.mend("B", "gpu_error", "Xid 95", 0.3, "reboot")
        desk.replacements.mend("C", "gpu_error", "Xid 95", 0.5, "reboot")
        (told,) = await desk.outcomes("told")
        assert told.machine == "m-C"

    desk.run(story)


@pytest.mark.parametrize("outcome", ["begun", "held_back"])
def test_a_coordinator_that_is_started_anew_goes_on(
    tmp_path: Path, outcome: events.ReplacementOutcome
) -> None:
    desk = Desk(tmp_path)
    before = events.NodeReplacement(
        time=time.time(), node="B", machine="m-B", outcome=outcome, reason="link: r", detail=""
    )
    desk.file.add("m-B", mark())
    desk.replacements.replay([before])

    async def story() -> None:
        desk.replacements.begin()
        await desk.lose("b", cause=CRASH)
        expected = ["replaced"] if outcome == "begun" else ["begun", "replaced"]
        *_, done = await desk.outcomes(*expected)
        assert (done.node, done.reason) == ("B", "link: r")

    desk.run(story)
    assert desk.ended == ["B"]


class Reboots(Scarce):
    """Reboots machines, or fails to."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.refusals = list(errors)
        self.rebooted: list[list[str]] = []
        self.ends = threading.Event()
        """Set when the caller may hear of it; not while its machine goes down."""
        self.ends.set()
        self.late: Exception | None = None
        """How it ends then, where not well."""

    def machine_of(self, node: NodeIdentity) -> str:
        return f"m-{node.node[0]}"  # after a reboot Ray has another node there

    def reboot(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str | None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.rebooted.append([node.node for node in nodes])
        assert self.ends.wait(PATIENCE_S)
        if self.late is not None:
            raise self.late
        return "it was rebooted"


def test_a_reboot_that_takes_the_coordinator_with_it_is_asked_for_once(tmp_path: Path) -> None:
    provider = Reboots()
    provider.ends.clear()
    first = Desk(tmp_path, provider=provider)

    async def goes_down() -> None:
        await first.until_it_may_reboot()
        while not provider.rebooted:
            await asyncio.sleep(0.005)

    first.run(goes_down)
    happened = first.told()
    spoke, left = first.file.read()["m-B"]
    assert (spoke.cause, spoke.detail) == ("gpu_error", "Xid 95"), "nobody knows whether it was"
    assert (left.cause, left.detail) == ("rebooted", "gpu_error: Xid 95")
    second = Desk(tmp_path, provider=provider)
    second.replacements.replay(happened)

    async def comes_back() -> None:
        second.replacements.begin()
        second.lose_on("B", NODE)  # not heard of again
        second.join_from("B")
        await second.lose("b", cause=CRASH)
        *_, done = await second.outcomes("begun", "replaced")
        assert (done.node, done.step) == ("B", "replace_node")

    second.run(comes_back)
    assert provider.rebooted == [["B"]] and provider.replaced == ["m-B"]
    assert second.file.read() == {}
    provider.ends.set()


def test_nor_does_the_next_run_welcome_or_reboot_a_machine_that_was_perhaps_rebooted(
    tmp_path: Path,
) -> None:
    provider = Reboots()
    desk = Desk(tmp_path, provider=provider)
    desk.file.add("m-B", mark(ago_s=60.0))
    desk.file.add("m-B", replace(mark(0.3, ago_s=59.0), cause="rebooted", detail="link: 64 bytes"))

    async def story() -> None:
        desk.join_from("B")
        (begun,) = await desk.outcomes("begun")
        assert (begun.step, begun.machine) == ("replace_node", "m-B")
        await desk.lose("b", cause=CRASH)
        await desk.outcomes("begun", "replaced")

    desk.run(story)
    assert provider.rebooted == [] and provider.replaced == ["m-B"]


def test_a_reboot_that_was_made_is_known_to_the_next_coordinator(tmp_path: Path) -> None:
    """The one before it ended before it could tell."""
    provider = Reboots()
    first = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await first.until_it_may_reboot()
        await first.outcomes("begun", "rebooted")

    first.run(story)
    begun, _ = first.told()
    second = Desk(tmp_path, provider=provider)
    second.replacements.replay([begun])

    async def comes_back() -> None:
        second.replacements.begin()
        second.lose_on("B", NODE)  # not heard of again
        second.join_from("B")
        *_, done = await second.outcomes("begun", "rebooted", "rebooted")
        assert (done.node, done.step) == ("B", "reboot")
        second.replacements.mend("B", "gpu_error", "Xid 95", 1.0, "reboot")
        while len(second.file.read()["m-B"]) < 2:
            await asyncio.sleep(0.005)

    second.run(comes_back)
    assert provider.rebooted == [["B"]] and second.drained == [] and not provider.replaced
    assert [one.cause for one in second.file.read()["m-B"]] == ["rebooted", "gpu_error"]


def test_a_reboot_that_the_platform_may_have_heard_of_counts_as_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away whenever it is asked, and the coordinator goes down before it asks again."""
    monkeypatch.setattr(replacements, "FIRST_PAUSE_S", 0.3)
    monkeypatch.setattr(replacements, "LONGEST_PAUSE_S", PATIENCE_S)
    away = ProviderAwayError("PATCH /nodes/m-B", "the line broke", "Look at it")
    provider = Reboots(away, away, away)
    first = Desk(tmp_path, provider=provider)

    async def goes_down() -> None:
        await first.until_it_may_reboot()
        await first.outcomes("begun", "held_back", "held_back")

    first.run(goes_down)
    assert [one.cause for one in first.file.read()["m-B"]] == ["gpu_error", "rebooted"]
    provider.refusals.clear()
    second = Desk(tmp_path, provider=provider)
    second.replacements.replay(first.told())

    async def comes_back() -> None:
        second.replacements.begin()
        await second.lose("b", cause=CRASH)
        while second.told()[-1].outcome not in ("rebooted", "replaced"):
            await asyncio.sleep(0.005)

    second.run(comes_back)
    assert provider.rebooted == [] and provider.replaced == ["m-B"]


@pytest.fixture
def _quick_reboots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are over in a moment."""
    monkeypatch.setattr(replacements, "REBOOT_S", 0.1)


def before(desk: Desk, *outcomes: events.ReplacementOutcome, ago_s: float = 0.0) -> None:
    """What a coordinator before this one has done about machine m-B, which has left a mark."""
    desk.file.add("m-B", replace(mark(0.3, ago_s=ago_s), cause="rebooted", run="run"))
    desk.replacements.replay(
        events.NodeReplacement(
            time=time.time() - ago_s,
            node="B",
            machine="m-B",
            outcome=one,
            reason="gpu_error: Xid 95",
            detail="",
            step="reboot",
        )
        for one in outcomes
    )


def became(node: str, outcome: events.ReplacementOutcome, ago_s: float) -> events.NodeReplacement:
    """What a coordinator before this one has told of a node's machine."""
    return events.NodeReplacement(
        time=time.time() - ago_s,
        node=node,
        machine=f"m-{node[0]}",
        outcome=outcome,
        reason="",
        detail="",
    )


@pytest.mark.usefixtures("_quick_reboots")
@pytest.mark.parametrize("stays", [[], ["B"], ["B", "B-beside"]])
def test_a_machine_that_does_not_come_back_from_its_reboot_is_replaced(
    tmp_path: Path, stays: list[str]
) -> None:
    """Where it never went down, those of Ray's nodes are there still that it was left with."""
    provider = Reboots()
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        desk.alive[1:2] = stays
        await desk.until_it_may_reboot()
        *_, again, done = await desk.outcomes("begun", "rebooted", "begun", "replaced")
        assert (again.node, again.machine, again.step) == ("B", "m-B", "replace_node")
        late = "Ray has no new node there 0.1 s after its reboot was asked for"
        assert done.reason == f"reboot: {late}"

    desk.run(story)
    assert provider.rebooted == [stays or ["B"]] and provider.replaced == ["m-B"]
    assert desk.file.read() == {}


@pytest.mark.parametrize("held", [False, True])
def test_that_holds_for_a_coordinator_started_anew_and_for_the_breaker(
    tmp_path: Path, held: bool
) -> None:
    provider = Reboots()
    begun = [time.time() - 3599.5] if held else []
    desk = Desk(tmp_path, provider=provider, per_hour=1, begun=begun)
    before(desk, "begun", "rebooted", ago_s=901.0)

    async def story() -> None:
        desk.alive.remove("B")
        await desk.lose("b", cause=CRASH)
        desk.replacements.begin()
        await desk.outcomes(*(["held_back"] if held else []), "begun", "replaced")

    desk.run(story)
    assert provider.replaced == ["m-B"]


def test_one_that_has_come_back_before_is_looked_for_as_well(tmp_path: Path) -> None:
    provider = Reboots()
    desk = Desk(tmp_path, provider=provider)
    desk.replacements.replay([became("B-old", "returned", 90_000.0)])
    before(desk, "begun", "rebooted", ago_s=901.0)

    async def story() -> None:
        desk.alive.remove("B")
        await desk.lose("b", cause=CRASH)
        desk.replacements.begin()
        await desk.outcomes("begun", "replaced")

    desk.run(story)
    assert provider.replaced == ["m-B"]


class Elsewhere(Reboots):
    """What has B's address by now is another machine, which is sound."""

    def machine_of(self, node: NodeIdentity) -> str:
        return "m-other" if node.node[0] == "B" else super().machine_of(node)


@pytest.mark.parametrize("gone", ["", "B"])
def test_after_a_restart_the_one_that_does_not_come_back_is_the_one_that_was_known(
    tmp_path: Path, gone: str
) -> None:
    """Ray may have forgotten its node."""
    provider = Elsewhere()
    desk = Desk(tmp_path, provider=provider, gone=gone)
    before(desk, "begun", "rebooted", ago_s=901.0)

    async def story() -> None:
        desk.alive[1] = "B-other"
        await desk.lose("b", cause=CRASH)
        desk.replacements.begin()
        *_, done = await desk.outcomes("begun", "replaced")
        assert (done.node, done.machine) == ("B", "m-B")

    desk.run(story)
    assert provider.replaced == ["m-B"] and desk.file.read() == {}


@pytest.mark.usefixtures("_quick_reboots")
def test_one_that_comes_back_is_told_of_and_holds_nobody_back(tmp_path: Path) -> None:
    provider = Reboots()
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        provider.ends.clear()
        await desk.until_it_may_reboot()
        while not provider.rebooted:
            await asyncio.sleep(0.005)
        desk.alive[1] = "B-anew"
        provider.ends.set()
        *_, back = await desk.outcomes("begun", "rebooted", "returned")
        assert (back.node, back.detail) == ("B", "Ray has a new node there")
        assert desk.replacements.attends_to("B"), "what happened there is met"
        await desk.lose("c")
        await desk.outcomes("begun", "rebooted", "returned", "begun", "replaced")

    desk.run(story)
    assert provider.replaced == ["m-C"]
    (left,) = desk.file.read()["m-B"]
    assert left.cause == "rebooted", "it is on probation still"


@pytest.mark.usefixtures("_quick_reboots")
@pytest.mark.parametrize("why", ["returned", "replaced", "kubernetes"])
def test_one_that_is_gone_for_another_reason_is_left_alone(tmp_path: Path, why: str) -> None:
    """The clock is a machine that takes the same way, and would be held back by it."""
    provider = Reboots()
    nodes: Literal["tell"] | NodesConfig = KubeNodes() if why == "kubernetes" else "tell"
    desk = Desk(tmp_path, provider=provider, nodes=nodes)
    newest: events.ReplacementOutcome = "returned" if why == "returned" else "rebooted"
    before(desk, "begun", newest, ago_s=901.0)
    of_another = became("B-anew", "replaced", 700.0)
    desk.replacements.replay([of_another] if why == "replaced" else [])

    async def story() -> None:
        desk.alive.remove("B")
        desk.replacements.begin()
        for _ in range(30):  # as many turns of its threads as it would take
            await desk.aside.on_thread(int)
        await desk.lose("c")
        begun, _ = await desk.outcomes("begun", "replaced")
        assert begun.machine == "m-C"

    desk.run(story)
    assert provider.replaced == ["m-C"]


@pytest.mark.usefixtures("_quick_reboots")
@pytest.mark.parametrize("of", ["provider", "ray"])
def test_a_machine_is_looked_for_until_all_that_may_be_it_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, of: str
) -> None:
    """A new node of Ray's with its address, or whose address Ray does not tell."""
    provider = Unsure({"B-anew": 3 * (of == "provider")})
    desk = Desk(tmp_path, provider=provider, gone="B-anew" if of == "ray" else "")

    async def story() -> None:
        provider.ends.clear()
        await desk.until_it_may_reboot()
        while not provider.rebooted:
            await asyncio.sleep(0.005)
        desk.alive[1] = "B-anew"
        provider.ends.set()
        while "the machine of node B-anew is not known" not in caplog.text:
            await asyncio.sleep(0.005)
        desk.gone = ""
        await desk.outcomes("begun", "rebooted", "returned")

    desk.run(story)
    assert provider.in_vain == {"B-anew": 0} and provider.replaced == []


@pytest.mark.usefixtures("_quick_reboots")
def test_another_that_nobody_knows_is_not_taken_for_a_machine_that_reboots(tmp_path: Path) -> None:
    """As a machine of the cluster that has only CPUs, and no tag."""
    provider = Unsure({"A": 1_000_000})
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        desk.alive.remove("B")
        await desk.until_it_may_reboot()
        await desk.outcomes("begun", "rebooted", "begun", "replaced")

    desk.run(story)
    assert provider.replaced == ["m-B"]


class Unsure(Reboots):
    """Does not know what is below some nodes.

    Args:
        in_vain: node -> how often it is asked for in vain.
    """

    def __init__(self, in_vain: dict[str, int]) -> None:
        super().__init__()
        self.in_vain = in_vain

    def machine_of(self, node: NodeIdentity) -> str:
        if self.in_vain.get(node.node, 0) > 0:
            self.in_vain[node.node] -= 1
            raise LookupError("no instance has this address")
        return super().machine_of(node)


@pytest.mark.parametrize("error", [PermissionError("no rights"), ProviderAwayError("a", "b", "c")])
def test_a_machine_that_was_not_rebooted_stays_suspect(tmp_path: Path, error: Exception) -> None:
    provider = Reboots(error)
    desk = Desk(tmp_path, provider=provider)
    away = isinstance(error, ProviderAwayError)

    async def story() -> None:
        await desk.until_it_may_reboot()
        await desk.outcomes(*(["begun", "held_back", "rebooted"] if away else ["begun", "failed"]))

    desk.run(story)
    expected = "rebooted" if away else "gpu_error"
    assert [one.cause for one in desk.file.read()["m-B"]] == [expected]


@pytest.mark.parametrize("ends", ["rebooted", "failed"])
def test_one_that_is_cleared_while_its_reboot_is_asked_for_stays_cleared(
    tmp_path: Path, ends: events.ReplacementOutcome
) -> None:
    provider = Reboots()
    provider.ends.clear()
    desk = Desk(tmp_path, provider=provider)

    async def story() -> None:
        await desk.until_it_may_reboot()
        while not provider.rebooted:
            await asyncio.sleep(0.005)
        assert main(["nodes", "clear", str(tmp_path), "m-B"]) == 0
        if ends == "failed":
            provider.late = PermissionError("no rights")
        provider.ends.set()
        while ends not in [event.outcome for event in desk.told()]:
            await asyncio.sleep(0.005)

    desk.run(story)
    assert desk.file.read() == {}


def test_what_was_cleared_while_no_coordinator_was_there_is_not_replaced(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    held = events.NodeReplacement(
        time=time.time(), node="B", machine="m-B", outcome="held_back", reason="r", detail=""
    )
    desk.replacements.replay([held])

    async def story() -> None:
        desk.replacements.begin()
        await desk.lose("b", cause=CRASH)
        await desk.outcomes("cleared")

    desk.run(story)
    assert desk.ended == desk.drained == []


def test_what_began_and_failed_begins_anew_and_may_be_held_back(tmp_path: Path) -> None:
    now = time.time()
    desk = Desk(tmp_path, per_hour=1, begun=(now,))
    desk.file.add("m-B", mark())
    past: list[events.ReplacementOutcome] = ["begun", "failed", "cleared", "held_back"]
    desk.replacements.replay(
        events.NodeReplacement(time=now, node="B", machine="m-B", outcome=one, reason="", detail="")
        for one in past
    )

    async def story() -> None:
        desk.replacements.begin()
        await desk.lose("b", cause=CRASH)
        (held,) = await desk.outcomes("held_back")
        assert "health.max_replacements_per_hour = 1" in held.detail

    desk.run(story)
    assert desk.ended == []


@pytest.mark.parametrize("gone", ["", "B"])
@pytest.mark.parametrize("outcome", ["begun", "held_back"])
def test_after_a_restart_the_machine_is_the_one_that_was_known(
    tmp_path: Path, outcome: events.ReplacementOutcome, gone: str
) -> None:
    """It may have ended since, with the coordinator on it, and its address may be another's."""
    provider = Forgetful(99)
    desk = Desk(tmp_path, provider=provider, gone=gone)
    before = events.NodeReplacement(
        time=time.time(), node="B", machine="i-B", outcome=outcome, reason="link: r", detail=""
    )
    desk.file.add("i-B", mark())
    desk.replacements.replay([before])

    async def story() -> None:
        desk.replacements.begin()
        await desk.lose("b", cause=CRASH)
        expected = ["replaced"] if outcome == "begun" else ["begun", "replaced"]
        *_, done = await desk.outcomes(*expected)
        assert (done.node, done.machine) == ("B", "i-B")

    desk.run(story)
    assert provider.replaced == ["i-B"] and desk.file.read() == {}


def test_after_a_restart_ray_is_asked_until_it_says_what_the_node_was(tmp_path: Path) -> None:
    """Its pod is found by what Ray knows of it; else the node is cordoned, and the pod lives on."""
    (tmp_path / "account").mkdir()
    with kube_server(tmp_path / "account") as kube:
        kube.add_node("n2")
        kube.add_pod("m-B", "n2")
        provider = KubeProvider(KubeApi(kube.account))
        desk = Desk(tmp_path / "storage", provider=provider, silent=2)
        desk.file.add("n2", mark())
        begun = events.NodeReplacement(
            time=time.time(), node="B", machine="n2", outcome="begun", reason="r", detail=""
        )
        desk.replacements.replay([begun])

        async def story() -> None:
            await desk.lose("b", cause=CRASH)
            desk.replacements.begin()
            (done,) = await desk.outcomes("replaced")
            assert done.detail == "the node was cordoned; pod m-B was deleted"

        desk.run(story)
        assert not kube.pods


def test_nothing_is_done_before_a_coordinator_started_anew_knows_who_has_a_place(
    tmp_path: Path,
) -> None:
    """It would find that nobody works there, and have the machine ended under its workers."""
    desk = Desk(tmp_path)
    begun = events.NodeReplacement(
        time=time.time(), node="B", machine="m-B", outcome="begun", reason="r", detail=""
    )
    desk.file.add("m-B", mark())
    desk.replacements.replay([begun])
    ready = desk.dispatcher.ready

    async def story() -> None:
        ready.clear()
        desk.replacements.begin()
        for _ in range(30):  # as many turns of its threads as it would take
            await desk.aside.on_thread(int)
        assert desk.drained == desk.ended == []
        ready.set()
        while desk.drained != ["B"]:
            await asyncio.sleep(0.005)
        await desk.lose("b", cause=CRASH)
        await desk.outcomes("replaced")

    desk.run(story)


@pytest.mark.parametrize(
    ("outcome", "ago_s", "held"),
    [
        ("begun", 700.0, True),
        ("replaced", 0.0, True),
        ("replaced", 700.0, False),
        ("told", 0.0, True),
        ("told", 700.0, False),  # a provider would have replaced it
        ("failed", 0.0, True),
        ("failed", 700.0, False),  # nobody works there any more
        ("cleared", 0.0, False),
    ],
)
def test_after_a_new_start_others_that_are_suspect_count(
    tmp_path: Path, outcome: events.ReplacementOutcome, ago_s: float, held: bool
) -> None:
    desk = Desk(tmp_path)
    desk.replacements.replay([became("Z", "held_back", ago_s), became("Z", outcome, ago_s)])

    async def story() -> None:
        await desk.lose("b")
        if held:
            await desk.outcomes("held_back")
        else:
            await desk.outcomes("begun", "replaced")

    desk.run(story)


@pytest.mark.parametrize("ago_s", [0.0, 700.0])
@pytest.mark.parametrize("failed", ["A", "AC", "AYZ"])
def test_several_that_could_not_be_replaced_count_while_the_run_works_on_them(
    tmp_path: Path, failed: str, ago_s: float
) -> None:
    """It works on A and C. One may not be replaced for what is its own, such as Ray's head."""
    desk = Desk(tmp_path, head="A")
    desk.replacements.replay(became(node, "failed", ago_s) for node in failed)

    async def story() -> None:
        await desk.lose("b")
        if failed == "AC" or not ago_s:
            (held,) = await desk.outcomes("held_back")
            assert held.detail.startswith(f"{len(failed) + 1} of 3 machines")
        else:
            await desk.outcomes("begun", "replaced")

    desk.run(story)


@pytest.mark.parametrize("outcomes", [["failed"], ["rebooted"], ["failed", "rebooted"]])
@pytest.mark.parametrize("suspect", ["B", "C"])
def test_a_machine_counts_once_however_often_ray_was_started_there(
    tmp_path: Path, outcomes: Sequence[events.ReplacementOutcome], suspect: str
) -> None:
    """A node of Ray's there is another one each time."""
    desk = Desk(tmp_path, provider=Reboots())
    desk.replacements.replay(
        became(f"B-{number}", one, 300.0 - number) for number, one in enumerate(outcomes)
    )

    async def story() -> None:
        await desk.lose(suspect.lower())
        if suspect == "B":
            await desk.outcomes("begun", "replaced")
        else:
            (held,) = await desk.outcomes("held_back")
            assert held.detail.startswith("2 of ")

    desk.run(story)


def test_by_default_a_machine_of_before_is_told_of(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tells=True)
    desk.file.add("m-B", mark())

    async def story() -> None:
        desk.join_from("C")
        desk.join_from("B")
        (told,) = await desk.outcomes("told")
        assert (told.node, told.reason) == ("B", "remembered of run before: link: 64 bytes")

    desk.run(story)
    assert desk.file.read().keys() == {"m-B"}


def test_what_the_platform_says_twice_speaks_against_a_machine(tmp_path: Path) -> None:
    """KubeRay's pod m-B runs on node n2, and EKS's agent has found a fault there."""
    (tmp_path / "account").mkdir()
    with kube_server(tmp_path / "account") as kube:
        for index, pod in enumerate(("m-A", "m-B", "m-C"), start=1):
            kube.add_node(f"n{index}")
            kube.add_pod(pod, f"n{index}")
        provider = KubeProvider(KubeApi(kube.account))
        desk = Desk(tmp_path / "storage", provider=provider)
        fault: dict[str, Any] = {"type": "NetworkingReady", "status": "False", "reason": "EFA"}

        async def story() -> None:
            desk.replacements.begin()
            while kube.calls.count("GET /api/v1/nodes") < 3:
                await asyncio.sleep(0.005)
            assert desk.told() == []
            kube.nodes["n2"]["status"]["conditions"].append(fault)
            (begun,) = await desk.outcomes("begun")
            assert (begun.node, begun.machine) == ("B", "n2")
            assert begun.reason == "platform: NetworkingReady: EFA"
            kube.nodes["n3"]["status"]["conditions"].append(fault)  # b has not left yet
            _, held = await desk.outcomes("begun", "held_back")
            assert held.machine == "n3"
            await desk.lose("b", cause=CRASH)
            await desk.outcomes("begun", "held_back", "replaced")

        desk.run(story)
        assert kube.nodes["n2"]["spec"]["unschedulable"] is True
        assert kube.pods.keys() == {"m-A", "m-C"}


def test_on_hyperpod_a_machine_may_be_rebooted_first_and_is_replaced_the_next_time(
    tmp_path: Path,
) -> None:
    (tmp_path / "account").mkdir()
    with kube_server(tmp_path / "account") as kube:

        def lose_b(outcome: str, *marks: Mark) -> str:
            kube.add_node("n2", **{HEALTH_LABEL: "Schedulable"})
            kube.add_pod("m-B", "n2")
            provider = KubeProvider(KubeApi(kube.account))
            desk = Desk(tmp_path / outcome, provider=provider, nodes=KubeNodes(reboot=True))
            for one in marks:
                desk.file.add("n2", one)

            async def story() -> None:
                await desk.lose("b")
                while not desk.told() or desk.told()[-1].outcome != outcome:
                    await asyncio.sleep(0.005)

            desk.run(story)
            label: str = kube.nodes["n2"]["metadata"]["labels"][HEALTH_LABEL]
            return label

        assert lose_b("rebooted") == REBOOT
        (left,) = SuspectFile(tmp_path / "rebooted").read()["n2"]
        assert left.cause == "rebooted"
        hours_ago = replace(left, time=left.time - 4 * 3600)
        assert lose_b("replaced", hours_ago) == REPLACE
