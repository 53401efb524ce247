"""What lost workers wrote last is kept, and holds nobody up; so is all output of a machine that is
replaced. The agents' part is the real one, on files here; a kill in a whole run:
`tests/integration/test_user_errors.py`."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from pathlib import Path
from subprocess import PIPE
from typing import IO

import pytest

from elastic.coordinator import last_words
from elastic.coordinator.aside import Aside
from elastic.coordinator.last_words import LastWords
from elastic.node import agent
from elastic.node.agent import NodeAgent
from elastic.node.process_watch import ProcessWatch
from elastic.protocol.causes import (
    COLLECTIVE,
    CRASH,
    HANG,
    LINK,
    PREEMPTION,
    USER_ERROR,
    Cause,
)
from elastic.protocol.events import WorkerJoined, WorkerLost
from elastic.protocol.messages import Death, Evidence
from elastic.reporting import outputs
from elastic.reporting.outputs import keep_files, read_kept
from health.reading import Reading
from tests.support.coordinator_desk import CoordinatorDesk
from tests.support.rays_output import writes_beside
from tests.support.watching import wait_until

PATIENCE_S = 20.0
GPU = Reading(kind="gpu", of="0000:53:00", at_s=5.0, values={"power_w": 71.0}, pids=(7,))
OTHERS = Reading(kind="gpu", of="0000:9b:00", at_s=5.0, values={"power_w": 71.0}, pids=(8,))


class Agents:
    """Of all nodes but those that are gone, as the coordinator asks them."""

    def __init__(self) -> None:
        self.agent = object.__new__(NodeAgent)
        self.agent._readings = [GPU, OTHERS]
        self.agent._processes = ProcessWatch(freeze_timeout_s=PATIENCE_S)
        self.agent._reads, self.agent._read_s = threading.Lock(), inf
        self.gone: set[str] = set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[str] = []

    async def last_words(self, ended: Iterable[WorkerJoined]) -> dict[str, Evidence]:
        there = [one for one in ended if one.node not in self.gone]
        self.asked += [one.worker for one in there]
        await self.answers.wait()
        return self.agent.last_words(there)

    async def output(
        self, node: str, files: Sequence[str], most_bytes: int
    ) -> dict[str, str] | None:
        self.asked.append(node)
        await self.answers.wait()
        return None if node in self.gone else self.agent.output(files, most_bytes)


class Desk(CoordinatorDesk):
    """Workers a, b and c on nodes A, B and C, and files for their output."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "run")
        self.on_nodes, self._logs = Agents(), root / "logs"
        self._logs.mkdir()
        self.words = LastWords(
            self.paths,
            self.on_nodes,  # type: ignore[arg-type]
            self.records,
            Aside(self.membership, self.dispatcher),
        )
        self.joined = {worker: self._joins(worker) for worker in "abc"}

    def _joins(self, worker: str) -> WorkerJoined:
        log = self._logs / f"worker-0{worker}-01000000-7.err"
        log.write_text(f"first of {worker}\nlast of {worker}\n")
        event = WorkerJoined(
            time=1.0, worker=worker, node=worker.upper(), pid=7, born_ticks=1, logs=[str(log)]
        )
        self.records.note(event)
        return event

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        async def tell() -> None:
            await asyncio.wait_for(story(), PATIENCE_S)
            self.records.end("interrupted", None).result()

        with self.as_an_agent():
            asyncio.run(tell())

    def as_an_agent(self) -> AbstractContextManager[None]:
        """In the block this process's own output lies beside that of the workers."""
        return writes_beside(self._logs / "any.err")

    def manifests(self) -> list[dict[str, object]]:
        paths = sorted(self.paths.incidents.glob("*/manifest.json"))
        return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("cause", [CRASH, USER_ERROR, COLLECTIVE])
def test_the_last_words_of_a_worker_that_is_lost_are_kept(tmp_path: Path, cause: Cause) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.workers.lose("b", cause, "process 7 ended by SIGSEGV")
        await desk.words.finish()

    desk.run(story)
    (manifest,) = desk.manifests()
    assert manifest["accused"] == {"b": f"{cause}: process 7 ended by SIGSEGV"}
    folder = desk.paths.incidents / "001"
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "b.log", "readings.json"}
    assert "first of b\nlast of b\n" in (folder / "b.log").read_text()
    (reading,) = json.loads((folder / "readings.json").read_text())["b"]
    assert reading["of"] == GPU.of


@pytest.mark.parametrize("cause", [HANG, LINK, PREEMPTION])
def test_who_was_looked_at_before_or_was_to_go_is_not_asked(tmp_path: Path, cause: Cause) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.workers.lose("b", cause, "as found")
        await desk.words.finish()

    desk.run(story)
    assert desk.on_nodes.asked == [] and not desk.paths.incidents.exists()


def test_who_was_killed_by_its_agent_is_asked(tmp_path: Path) -> None:
    """The agent has looked at its stacks alone. Who was ended by the coordinator was looked at."""
    desk = Desk(tmp_path)

    async def story() -> None:
        frozen = Death(worker="b", cause=HANG, detail="frozen", evidence=Evidence(stacks="in T"))
        deaths = [frozen, Death(worker="c", cause=HANG, detail="")]
        desk.words.expect_of_frozen(deaths)
        for worker in "abc":
            await desk.workers.lose(worker, HANG, "as found")
        desk.words.expect_of_frozen(deaths)  # the first answer to the agent was lost
        await desk.words.finish()
        assert not desk.words._frozen, "the lost are forgotten"

    desk.run(story)
    assert desk.on_nodes.asked == ["b"]
    assert "last of b\n" in (desk.paths.incidents / "001" / "b.log").read_text()


def test_no_words_come_of_what_is_no_output_of_a_worker(tmp_path: Path) -> None:
    """The records may name anything, if others can write to the run directory."""
    desk = Desk(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("key\n")
    desk.records.note(replace(desk.joined["b"], logs=[str(secret), desk.joined["c"].logs[0]]))

    async def story() -> None:
        await desk.workers.lose("b", CRASH, "process 7 ended")
        await desk.words.finish()

    desk.run(story)
    kept = (desk.paths.incidents / "001" / "b.log").read_text()
    assert "last of c" in kept and "key" not in kept


def test_an_agent_that_takes_its_time_holds_up_nobody(tmp_path: Path) -> None:
    """Who is lost meanwhile shares a folder."""
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.on_nodes.answers.clear()
        for worker in "abc":
            await desk.workers.lose(worker, CRASH, "process 7 ended")
            while not desk.on_nodes.asked:
                await asyncio.sleep(0)
        assert [lost.worker for lost in desk.happened(WorkerLost)] == ["a", "b", "c"]
        assert desk.on_nodes.asked == ["a"]
        desk.on_nodes.answers.set()
        await desk.words.finish()

    desk.run(story)
    assert [list(one["accused"]) for one in desk.manifests()] == [["a"], ["b", "c"]]  # type: ignore[call-overload]


def test_of_a_node_that_is_gone_nothing_comes_and_nothing_is_written(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.on_nodes.gone = {"B"}

    async def story() -> None:
        await desk.workers.lose("b", CRASH, "process 7 ended")
        await desk.words.finish()
        await desk.words.keep_output("B")

    desk.run(story)
    assert not desk.paths.incidents.exists() and not desk.paths.output_of("B").exists()


def test_a_storage_that_hangs_holds_up_the_end_of_a_run_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(last_words, "FINISH_S", 0.05)
    monkeypatch.setattr(last_words, "OUTPUT_S", 0.05)
    answers, hung = threading.Event(), []

    def hang(*_: object, **__: object) -> None:
        hung.append(threading.current_thread().name)
        answers.wait(PATIENCE_S)

    monkeypatch.setattr(last_words, "keep_evidence", hang)
    monkeypatch.setattr(last_words, "keep_files", hang)
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.workers.lose("b", CRASH, "process 7 ended")
        began_s = time.monotonic()
        await desk.words.finish()
        for _ in range(5):  # as for each try to replace the machine
            await desk.words.keep_output("B")
        assert time.monotonic() - began_s < PATIENCE_S / 2
        assert len(hung) == 1, "it takes one thread"
        answers.set()

    desk.run(story)
    assert "are not kept after 0.05 s" in caplog.text
    assert "on node B is not kept: TimeoutError()" in caplog.text


def test_last_words_leave_half_of_the_folders_to_who_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.coordinator.evidence.MOST_FOLDERS", 2)
    desk = Desk(tmp_path)

    async def story() -> None:
        for worker in "ab":
            await desk.workers.lose(worker, CRASH, "process 7 ended")
            await desk.words.finish()

    desk.run(story)
    assert [list(one["accused"]) for one in desk.manifests()] == [["a"]]  # type: ignore[call-overload]
    assert desk.on_nodes.asked == ["a"], "there is no folder for what b wrote"


def test_a_coordinator_that_is_started_anew_knows_who_wrote_where(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    anew = LastWords(
        desk.paths,
        desk.on_nodes,  # type: ignore[arg-type]
        desk.records,
        Aside(desk.membership, desk.dispatcher),
    )
    desk.records.followers[:] = [anew._hear]
    anew.replay(desk.joined.values())

    async def story() -> None:
        await desk.workers.lose("c", CRASH, "process 7 ended")
        await anew.finish()

    desk.run(story)
    assert "last of c" in (desk.paths.incidents / "001" / "c.log").read_text()


def test_all_output_of_a_node_is_kept_also_of_those_who_were_lost_there(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.workers.lose("b", PREEMPTION, "as announced")
        await desk.words.keep_output("B")

    desk.run(story)
    kept = desk.paths.output_of("B")
    (log,) = desk.joined["b"].logs
    Path(log).unlink()  # as the machine takes it along
    assert read_kept(kept, [log], 1 << 20) == {log: "first of b\nlast of b\n"}
    assert read_kept(kept, [log], 12) == {log: "last of b\n"}
    assert [path.name for path in kept.parent.iterdir()] == ["B"]


def test_output_is_kept_when_a_machine_is_announced_to_go_and_again_when_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_words, "LEAVE_S", 0.01)
    desk = Desk(tmp_path)
    (log,) = (Path(name) for name in desk.joined["b"].logs)
    kept = desk.paths.output_of("B") / log.name

    async def story() -> None:
        working = True
        desk.words.keep_announced("B", lambda node: working)
        await asyncio.to_thread(wait_until, lambda: kept.exists() and kept.read_text())
        assert kept.read_text() == "first of b\nlast of b\n"
        log.write_text("its very last\n")
        working = False
        await asyncio.to_thread(wait_until, lambda: kept.read_text() == "its very last\n")

    desk.run(story)


def test_of_many_machines_that_go_one_is_asked_after_the_other(tmp_path: Path) -> None:
    """Each answer is megabytes, and the coordinator's to hold."""
    desk = Desk(tmp_path)

    async def story() -> None:
        desk.on_nodes.answers.clear()
        for node in "ABC":
            desk.words.keep_announced(node, lambda node: False)
        await asyncio.to_thread(wait_until, lambda: desk.on_nodes.asked)
        assert desk.on_nodes.asked == ["A"]
        desk.on_nodes.answers.set()
        kept = [desk.paths.output_of(node) for node in "ABC"]
        await asyncio.to_thread(wait_until, lambda: all(map(Path.exists, kept)))

    desk.run(story)


def test_who_tells_of_its_end_before_it_writes_why_is_waited_for(tmp_path: Path) -> None:
    """As after an exception."""
    desk, asked = Desk(tmp_path), threading.Event()

    class Watch(ProcessWatch):
        def wait_ended(self, workers: Collection[str], timeout_s: float) -> None:
            asked.set()
            super().wait_ended(workers, timeout_s)

    watch = Watch(PATIENCE_S)
    log = Path(desk.joined["b"].logs[0])
    with subprocess.Popen(["sh", "-c", f"read go; echo why >> {log}"], stdin=PIPE) as process:
        watch.watch("b", process.pid, None)
        desk.on_nodes.agent._processes = watch

        def leave() -> None:
            asked.wait(PATIENCE_S)
            process.communicate(b"\n")
            while not watch.ended(PATIENCE_S):
                pass

        async def story() -> None:
            await desk.workers.lose("b", USER_ERROR, "RuntimeError: why")
            leaving = threading.Thread(target=leave)
            leaving.start()
            await desk.words.finish()
            leaving.join()

        desk.run(story)
    assert (desk.paths.incidents / "001" / "b.log").read_text().endswith("last of b\nwhy\n\n")


def test_a_disk_that_hangs_takes_one_thread_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_READ_S", 0.01)
    desk = Desk(tmp_path)
    ours = desk.on_nodes.agent
    ended, files = [desk.joined["b"]], desk.joined["b"].logs
    with desk.as_an_agent(), ours._reading(PATIENCE_S):
        words = ours.last_words(ended)
        assert not words["b"].log and words["b"].readings, "what was read before comes without"
        assert ours.output(files, 1 << 20) == {}
    with desk.as_an_agent():
        assert ours.last_words(ended)["b"].log and ours.output(files, 1 << 20)


def test_what_cannot_be_read_any_more_does_not_replace_what_is_kept(tmp_path: Path) -> None:
    name = "/logs/worker-0b-01000000-7.err"
    for text in ("last of b\n", ""):
        keep_files(tmp_path / "B", {name: text})
    assert read_kept(tmp_path / "B", [name], 1 << 20) == {name: "last of b\n"}


def test_what_cannot_be_written_any_more_does_not_replace_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, mode: str) -> IO[bytes]:
        with open(path, mode) as file:
            file.write(b"the new l")
        raise OSError(errno.ENOSPC, "No space left on device")

    name = "/logs/worker-0b-01000000-7.err"
    keep_files(tmp_path / "B", {name: "last of b\n"})
    with monkeypatch.context() as storage, pytest.raises(OSError, match="No space"):
        storage.setattr(Path, "open", full)
        keep_files(tmp_path / "B", {name: "the new last of b\n"})
    assert read_kept(tmp_path / "B", [name], 1 << 20) == {name: "last of b\n"}


def test_the_nodes_that_were_replaced_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "MOST_NODES", 2)
    for number, node in enumerate("CAB"):
        keep_files(tmp_path / node, {"/logs/w.err": "x"})
        os.utime(tmp_path / node, (number, number))
    keep_files(tmp_path / "D", {"/logs/w.err": "x"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["B", "D"]
