"""A node that is not heard in time is lost, one that is cut off ends its workers; a coordinator
that is slow, or has ended, does neither."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import ray

from checkpointing import CheckpointConfig
from elastic import HealthConfig
from elastic.node.agent import NodeAgent
from elastic.node.beats import BeatListener, name_of
from elastic.node.witnesses import WitnessStand
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.messages import Identity
from elastic.protocol.rpc import Remote
from elastic.ray_compat.cluster import start_actor
from health.lease import Reach
from tests.support.deaf_coordinator import DeafCoordinator, DyingCoordinator
from tests.support.sockets import port_that
from tests.support.tiny import fit, tiny_trainer
from tests.support.watching import actor_beside, events_of, steps_of, wait_until

STEPS, STOP_AFTER = 400, 5
NODE_TIMEOUT_S = 1.5
HEALTH = HealthConfig(node_beat_s=0.2, node_timeout_s=NODE_TIMEOUT_S)
DEADLINE_S = 120.0
SECRET = "of the agents"


class Stopper(threading.Thread):
    """Stops an actor of the run's control plane for a while, in the middle of the run."""

    def __init__(self, root: Path, actor: str, enough: Callable[[Stopper], bool]) -> None:
        super().__init__(daemon=True)
        self.root, self.actor, self.enough = root, actor, enough
        self.time = self.seconds = 0.0

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events_of(self.root, kind)

    def run(self) -> None:
        wait_until(lambda: steps_of(self.root) > STOP_AFTER)
        pid = actor_beside(self.events("worker_joined")[0]["pid"], self.actor)
        self.time = time.time()
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: self.enough(self))
        self.seconds = time.time() - self.time
        os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
def test_a_node_that_is_not_heard(cluster: None, text: Path, tmp_path: Path) -> None:
    """All workers of the run are on the node: the run goes on with those that replace them, and
    with another agent."""
    whole = fit(tiny_trainer(text, tmp_path, name="whole", replicas=1, steps=STEPS))
    stopper = Stopper(tmp_path / "run", "NodeAgent", lambda it: len(it.events("worker_lost")) > 0)
    stopper.start()
    checkpoint = CheckpointConfig(every_steps=100)
    broken = fit(
        tiny_trainer(
            text, tmp_path, replicas=1, spares=1, steps=STEPS, health=HEALTH, checkpoint=checkpoint
        )
    )
    lost, joined = stopper.events("worker_lost"), stopper.events("worker_joined")
    assert [event["cause"] for event in lost] == ["ray_node", "ray_node"]
    assert "not heard" in lost[0]["detail"]
    assert NODE_TIMEOUT_S - 0.5 < lost[0]["time"] - stopper.time < NODE_TIMEOUT_S + 2
    assert len(joined) > len(lost)
    for event in lost:
        assert not Path(f"/proc/{event['pid']}").exists()
    assert broken.params == whole.params
    assert broken.samples == whole.samples
    assert broken.losses == whole.losses


@pytest.mark.soak
def test_a_coordinator_that_was_held_up_loses_nobody(
    cluster: None, text: Path, tmp_path: Path
) -> None:
    pause_s = 3 * NODE_TIMEOUT_S
    stopper = Stopper(tmp_path / "run", "Coordinator", lambda it: time.time() > it.time + pause_s)
    stopper.start()
    fit(tiny_trainer(text, tmp_path, replicas=1, steps=STEPS, health=HEALTH))
    assert stopper.seconds > pause_s
    assert stopper.events("worker_lost") == []


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("reach", get_args(Reach))
def test_a_node_without_an_answer_ends_its_workers_where_the_coordinators_machine_is_silent(
    cluster: None, sleeper: subprocess.Popen[bytes], reach: Reach
) -> None:
    node = ray.get_runtime_context().get_node_id()
    deaf = socket.socket(type=socket.SOCK_DGRAM)
    deaf.bind(("127.0.0.1", 0))
    with deaf, port_that(reach) as address:
        coordinator = start_actor(DeafCoordinator, max_concurrency=100)()
        # It has the one call that an agent makes.
        api: Remote[CoordinatorApi] = Remote(coordinator.handle)
        start_agent = start_actor(NodeAgent, node=node, max_concurrency=8)
        agent = start_agent(api, node, "token", address, deaf.getsockname(), SECRET, HEALTH)
        identity = Identity(worker="w0", rank=0, node=node, pid=sleeper.pid)
        ray.get(agent.send(NodeAgent.watch, identity))
        if reach != "silent":
            with pytest.raises(subprocess.TimeoutExpired):
                sleeper.wait(3 * NODE_TIMEOUT_S)
            sleeper.kill()
        assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
        coordinator.send(DeafCoordinator.listen)
        wait_until(lambda: ray.get(coordinator.send(DeafCoordinator.all_told)) != [])
        (death,) = ray.get(coordinator.send(DeafCoordinator.all_told))
        ray.kill(agent.handle)
        ray.kill(coordinator.handle)
    assert (death.worker, death.cause) == ("w0", "node" if reach == "silent" else "crash")


def test_what_a_node_shows_is_told_until_it_is_heard(cluster: None, tmp_path: Path) -> None:
    """It may never change again."""
    node = ray.get_runtime_context().get_node_id()
    with socket.socket(type=socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        dying = start_actor(DyingCoordinator, max_concurrency=100, restarts=True)(tmp_path)
        api: Remote[CoordinatorApi] = Remote(dying.handle)
        start_agent = start_actor(NodeAgent, node=node, max_concurrency=8)
        address, beats = ("127.0.0.1", 1), deaf.getsockname()
        agent = start_agent(api, node, "token", address, beats, SECRET, HEALTH)
        told = {"signs_changed", "node_checked"}
        wait_until(lambda: {path.name for path in tmp_path.iterdir()} >= told)
        ray.kill(agent.handle)
        ray.kill(dying.handle)
    assert {f"first {name}" for name in told} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(("witness_silent_s", "ends"), [(60.0, False), (0.0, True), (None, True)])
def test_workers_go_on_where_the_coordinators_machine_is_gone_for_another_node_as_well(
    cluster: None,
    sleeper: subprocess.Popen[bytes],
    witness_silent_s: float | None,
    ends: bool,
) -> None:
    """They end where that one hears it, or says nothing."""
    node = ray.get_runtime_context().get_node_id()
    with (
        contextlib.closing(WitnessStand(("127.0.0.1", 1), SECRET)) as stand,
        socket.socket(type=socket.SOCK_DGRAM) as mailbox,
        port_that("silent") as address,
    ):
        listener = BeatListener(
            {name_of("token"): "token"},
            lambda token: True,
            lambda token, paces: None,
            lambda token, door: [("127.0.0.1", stand.port)],
        )
        mailbox.bind(("127.0.0.1", 0))
        mailbox.settimeout(DEADLINE_S)
        listener.connection_made(Through(mailbox))
        coordinator = start_actor(DeafCoordinator, max_concurrency=100)()
        # It has the one call that an agent makes.
        api: Remote[CoordinatorApi] = Remote(coordinator.handle)
        start_agent = start_actor(NodeAgent, node=node, max_concurrency=8)
        agent = start_agent(api, node, "token", address, mailbox.getsockname(), SECRET, HEALTH)
        identity = Identity(worker="w0", rank=0, node=node, pid=sleeper.pid)
        watched = agent.send(NodeAgent.watch, identity)
        while not ray.wait([watched], timeout=0)[0]:
            listener.datagram_received(*mailbox.recvfrom(100))
        listener.datagram_received(*mailbox.recvfrom(100))
        heard_s = time.monotonic()

        def ended() -> bool:
            if witness_silent_s is not None:
                stand.answer(witness_silent_s)
            return sleeper.poll() is not None

        wait_until(lambda: ended() or time.monotonic() - heard_s > 4 * NODE_TIMEOUT_S)
        ray.kill(agent.handle)
        ray.kill(coordinator.handle)
    assert (sleeper.poll() is not None) == ends


class Through(asyncio.DatagramTransport):
    """Sends answers through a socket of the test."""

    def __init__(self, mailbox: socket.socket) -> None:
        self.mailbox = mailbox

    def sendto(self, data: Any, addr: Any = None) -> None:
        self.mailbox.sendto(data, addr)


def test_a_node_whose_datagrams_are_not_answered_calls_until_they_are(cluster: None) -> None:
    node, health = ray.get_runtime_context().get_node_id(), HealthConfig(node_beat_s=0.5)
    listener = BeatListener(
        {name_of("token"): "token"}, lambda token: True, lambda token, paces: None
    )
    with socket.socket(type=socket.SOCK_DGRAM) as mailbox:
        mailbox.bind(("127.0.0.1", 0))
        mailbox.settimeout(DEADLINE_S)
        listener.connection_made(Through(mailbox))
        address = mailbox.getsockname()
        coordinator = start_actor(DeafCoordinator, max_concurrency=100)()
        # It has the one call that an agent makes.
        api: Remote[CoordinatorApi] = Remote(coordinator.handle)
        ray.get(coordinator.send(DeafCoordinator.listen))
        start_agent = start_actor(NodeAgent, node=node, max_concurrency=8)
        agent = start_agent(api, node, "token", address, address, SECRET, health)
        wait_until(lambda: ray.get(coordinator.send(DeafCoordinator.called)) > 2)
        unheard = ray.get(coordinator.send(DeafCoordinator.called))
        for _ in range(unheard + 2):  # those that led to these calls, and the first two
            listener.datagram_received(*mailbox.recvfrom(100))
        for _ in range(6):
            listener.datagram_received(*mailbox.recvfrom(100))
        calls = ray.get(coordinator.send(DeafCoordinator.called)) - unheard
        ray.kill(agent.handle)
        ray.kill(coordinator.handle)
    assert calls <= 2, "one may have been under way; without answers there are six"
