"""A node that is not heard in time is lost, and its workers never count again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import fit, tiny_trainer

from checkpointing import CheckpointConfig
from elastic import HealthConfig

STEPS, SILENT_AFTER = 90, 5
NODE_TIMEOUT_S = 1.5
DEADLINE_S = 120.0


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def agent_beside(worker: int) -> int:
    """The node agent's process: a child of the raylet that the worker belongs to."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        if path.read_bytes().startswith(b"ray::NodeAgent") and parent_of(pid) == parent_of(worker):
            return pid
    raise AssertionError("there is no node agent")


class Silencer(threading.Thread):
    """Stops the node's agent in the middle of the run, until the coordinator has lost the node."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.agent, self.time = 0, 0.0

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.root / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [record for record in records if record["kind"] == kind]

    def run(self) -> None:
        steps = self.root / "steps.jsonl"
        wait_until(lambda: steps.exists() and steps.read_text().count("\n") > SILENT_AFTER)
        self.agent = agent_beside(self.events("worker_joined")[0]["pid"])
        self.time = time.time()
        os.kill(self.agent, signal.SIGSTOP)
        wait_until(lambda: len(self.events("worker_lost")) > 0)
        os.kill(self.agent, signal.SIGCONT)


@pytest.mark.slow
def test_a_silent_node(cluster: None, text: Path, tmp_path: Path) -> None:
    """All workers of the run are on the node: the run goes on with those that replace them, and
    with another agent."""
    whole = fit(tiny_trainer(text, tmp_path, name="whole", replicas=1, steps=STEPS))
    silencer = Silencer(tmp_path / "run")
    silencer.start()
    health = HealthConfig(node_beat_s=0.2, node_timeout_s=NODE_TIMEOUT_S)
    checkpoint = CheckpointConfig(every_steps=30)
    broken = fit(
        tiny_trainer(
            text, tmp_path, replicas=1, spares=1, steps=STEPS, health=health, checkpoint=checkpoint
        )
    )
    lost, joined = silencer.events("worker_lost"), silencer.events("worker_joined")
    assert [event["cause"] for event in lost] == ["node", "node"]
    assert "not heard" in lost[0]["detail"]
    assert NODE_TIMEOUT_S - 0.5 < lost[0]["time"] - silencer.time < NODE_TIMEOUT_S + 2
    assert len(joined) > len(lost)
    for event in lost:
        assert not Path(f"/proc/{event['pid']}").exists()
    assert broken.params == whole.params
    assert broken.samples == whole.samples
    assert broken.losses == whole.losses
