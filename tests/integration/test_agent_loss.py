"""A node's agent is killed: another one takes its workers up, and nobody notices."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing import CheckpointConfig
from elastic import ScalingConfig
from tests.support.gated_run import HALF, gated_trainer
from tests.support.growing_run import STEPS, growing_trainer
from tests.support.tiny import numbers_of
from tests.support.watching import actor_beside, events_of, steps_of, wait_until

DUO = ScalingConfig(max_replicas=2)


class GatedRun:
    """A slow run of two replicas of one worker, to which something is done meanwhile."""

    def __init__(self, storage: Path) -> None:
        self.storage, self.root, self.gate = storage, storage / "run", storage / "gate"
        self.report: dict[str, Any] = {}

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return events_of(self.root, *kinds)

    def since(self, before: int, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events()[before:] if event["kind"] in kinds]

    @property
    def beside(self) -> int:
        """A process on the node."""
        return int(self.events("coordinator_started")[0]["pid"])

    def agent(self) -> int:
        return actor_beside(self.beside, "NodeAgent")

    def kill_agent(self) -> int:
        """Kills the node's agent. Returns the process of the next one, once it works."""
        first = self.agent()
        os.kill(first, signal.SIGKILL)

        def another() -> int:
            with contextlib.suppress(AssertionError):  # there is none yet
                found = self.agent()
                return found if found != first else 0
            return 0

        wait_until(another)
        return another()

    def wait_for_steps(self, more: int) -> None:
        until = steps_of(self.root) + more
        wait_until(lambda: steps_of(self.root) >= until)

    def fit(self, do: Callable[[GatedRun], None]) -> None:
        """Runs, and has `do` done once both replicas train."""
        errors: list[BaseException] = []

        def work() -> None:
            try:
                wait_until(lambda: self.root.exists() and steps_of(self.root) > 2)
                do(self)
            except BaseException as error:
                errors.append(error)
            finally:
                self.gate.touch()

        worker = threading.Thread(target=work)
        worker.start()
        trainer = growing_trainer(str(self.storage), str(self.gate), DUO, 1)
        self.report = numbers_of(trainer.fit())
        worker.join()
        if errors:
            raise errors[0]


def test_a_node_agent_is_killed(cluster: None, tmp_path: Path) -> None:
    """No worker is lost, no step stops; and a death after that is found as fast as ever."""
    killed_s = []

    def do(run: GatedRun) -> None:
        before = len(run.events())
        run.kill_agent()
        run.wait_for_steps(10)
        of_the_next = {"node_checked", "signs_changed"}  # it looks at the machine, too
        kinds = [e["kind"] for e in run.events()[before:] if e["kind"] not in of_the_next]
        assert kinds == ["agent_ended"]
        victim = run.events("worker_joined")[1]
        killed_s.append(time.time())
        os.kill(victim["pid"], signal.SIGKILL)
        wait_until(lambda: run.events("worker_lost"))
        (lost,) = run.events("worker_lost")
        assert (lost["worker"], lost["cause"]) == (victim["worker"], "crash")
        assert lost["time"] - killed_s[0] < 1

    run = GatedRun(tmp_path)
    run.fit(do)
    assert killed_s and run.report["outcome"] == "finished"
    assert len(run.events("worker_lost")) == 1 and steps_of(run.root) == STEPS


@pytest.mark.slow
def test_a_worker_dies_while_there_is_no_agent(cluster: None, tmp_path: Path) -> None:
    """The next one finds it gone."""

    def do(run: GatedRun) -> None:
        victim = run.events("worker_joined")[1]
        os.kill(run.agent(), signal.SIGKILL)
        os.kill(victim["pid"], signal.SIGKILL)
        wait_until(lambda: run.events("worker_lost"))
        (lost,) = run.events("worker_lost")
        assert (lost["worker"], lost["cause"]) == (victim["worker"], "crash")

    run = GatedRun(tmp_path)
    run.fit(do)
    assert run.report["outcome"] == "finished" and len(run.events("worker_lost")) == 1


@pytest.mark.soak
@pytest.mark.parametrize("pause_s", [0.0, 0.25])
def test_agent_worker_and_coordinator_are_killed_one_after_the_other(
    cluster: None, tmp_path: Path, pause_s: float
) -> None:
    """On the node of all workers: the replica that lives goes on."""

    def do(run: GatedRun) -> None:
        victim = run.events("worker_joined")[1]
        for pid in (run.agent(), victim["pid"], run.beside):
            os.kill(pid, signal.SIGKILL)
            time.sleep(pause_s)
        wait_until(lambda: run.events("worker_lost"))
        run.wait_for_steps(10)

    run = GatedRun(tmp_path)
    run.fit(do)
    assert run.report["outcome"] == "finished" and run.report["lost_steps"] == 0
    assert [e["anew"] for e in run.events("coordinator_started")] == [False, True]
    assert len(run.events("worker_lost")) == 1
    assert "restore" not in [e["outcome"] for e in run.events("regroup_done")]


@pytest.mark.soak
def test_agents_that_keep_ending_lose_the_node(cluster: None, tmp_path: Path) -> None:
    """With the reason; those that replace its workers have agents again."""

    def do(run: GatedRun) -> None:
        for _ in range(2):
            run.kill_agent()
        os.kill(run.agent(), signal.SIGKILL)
        wait_until(lambda: len(run.events("worker_lost")) == 2)
        wait_until(lambda: len(run.events("worker_joined")) == 4)

    run = GatedRun(tmp_path)
    run.fit(do)
    lost = run.events("worker_lost")
    assert len(run.events("agent_ended")) == 3
    assert [e["cause"] for e in lost] == ["ray_node", "ray_node"]
    assert {e["detail"] for e in lost} == {
        "its node agents keep ending, the last one: ActorDiedError"
    }
    assert run.report["outcome"] == "finished"


@pytest.mark.slow
def test_the_next_agent_watches_helpers_too(cluster: None, tmp_path: Path) -> None:
    """The uploader is frozen after the agent that watched it has ended: the last save needs it."""
    root, gate = tmp_path / "gated", tmp_path / "gate"

    def freeze() -> None:
        wait_until(lambda: events_of(root, "checkpoint_committed"))
        (started, *_) = events_of(root, "coordinator_started")
        uploader = actor_beside(started["pid"], "Uploader")
        os.kill(actor_beside(started["pid"], "NodeAgent"), signal.SIGKILL)
        wait_until(lambda: events_of(root, "agent_ended"))
        os.kill(uploader, signal.SIGSTOP)
        gate.touch()

    freezer = threading.Thread(target=freeze)
    freezer.start()
    checkpoint = CheckpointConfig(every_steps=HALF)
    report = numbers_of(gated_trainer(str(tmp_path), str(gate), 2, checkpoint=checkpoint).fit())
    freezer.join()
    assert report["outcome"] == "finished" and not events_of(root, "worker_lost")
    assert [e["helper"] for e in events_of(root, "helper_killed")] == ["uploader"]
