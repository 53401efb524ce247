"""What is done to a run of the soak, on one machine and on hosts with a network between them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks._chaos import NOTICE_S, Action, Deed, Schedule
from elastic.protocol import events
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from tests.support.hosts import Hosts, ip_of
from tests.support.watching import actor_beside

_E = TypeVar("_E", bound=events.Event)
_Done = tuple[tuple[str, ...], Callable[[], bool]]
"""The machines that something was done to, and a look whether the cluster has taken notice."""

_LOOK_S = 0.02
LARGE_BYTES = 1000
"""Packets that are longer are lost where large ones are."""


class Hand:
    """Does to a run what its schedule says, each thing when its step is recorded.

    Args:
        schedule: what is done, and when.
        root: the run's directory.
        pause: a file: while it stands, the run stands still.
        run: ends with the run.
    """

    def __init__(self, schedule: Schedule, root: Path, pause: Path, run: threading.Thread) -> None:
        self._schedule, self._pause = schedule, pause
        self._paths, self._run = RunPaths(root=root), run
        self.deeds: list[Deed] = []
        """What was done; less than all where the run was over before."""

    def work(self) -> None:
        """Returns when all is done or the run is over."""
        for action in self._schedule.actions:
            while not self._due(action):
                self._run.join(_LOOK_S)
                if not self._run.is_alive():
                    return
            self.deeds.append(self._do(action))

    def _due(self, action: Action) -> bool:
        steps = self._paths.steps
        recorded = steps.read_bytes().count(b"\n") if steps.exists() else 0
        happened = self._events(events.Event)
        stuck = bool(happened) and isinstance(happened[-1], events.BelowMinimum)
        return recorded >= action.step or (stuck and action.kind == "add")

    def _do(self, action: Action) -> Deed:
        began = time.time()
        if action.paused:
            self._pause.touch()
        try:
            nodes, noticed = getattr(self, f"_{action.kind}")(action)
            until = time.monotonic() + NOTICE_S
            while action.paused and not noticed() and time.monotonic() < until:
                self._run.join(_LOOK_S)
        finally:
            self._pause.unlink(missing_ok=True)
        return Deed(action=action, began=began, ended=time.time(), nodes=nodes)

    def _coordinator(self, _: Action) -> _Done:
        started = self._events(events.CoordinatorStarted)
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[-1].pid, signal.SIGKILL)
        return (), lambda: len(self._events(events.CoordinatorStarted)) > len(started)

    def _supervisor(self, _: Action) -> _Done:
        return self._kill("Supervisor", self._events(events.CoordinatorStarted)[-1].pid)

    def _agent(self, _: Action) -> _Done:
        return self._kill("NodeAgent", self._events(events.WorkerJoined)[-1].pid)

    def _kill(self, actor: str, beside: int) -> _Done:
        """Kills the actor of the run on the node of a process, if both are there."""
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(actor_beside(beside, actor), signal.SIGKILL)
        return (), lambda: True

    def _events(self, kind: type[_E]) -> list[_E]:
        return [e for e in read_events(self._paths.events) if isinstance(e, kind)]


class Fleet(Protocol):
    """Machines that come and go."""

    def add(self, cpus: int) -> str:
        """One more. Returns Ray's id of it."""

    def remove(self, at: int = -1) -> str:
        """One is gone without a word. Returns its id."""

    def drain(self) -> str:
        """Ray is told that the newest will go. Returns its id."""


class FleetHand(Hand):
    """Also lets machines come and go. It works on the main thread, where alone Ray starts
    machines."""

    def __init__(self, fleet: Fleet, *of_hand: Any) -> None:
        super().__init__(*of_hand)
        self._fleet, self._left = fleet, -1

    def _add(self, _: Action) -> _Done:
        node = self._fleet.add(self._schedule.layout.workers)
        return (node,), lambda: any(e.node == node for e in self._events(events.WorkerJoined))

    def _remove(self, _: Action) -> _Done:
        node = self._fleet.remove(self._left)
        return (node,), lambda: any(e.node == node for e in self._events(events.WorkerLost))

    def _drain(self, _: Action) -> _Done:
        node = self._fleet.drain()
        self._left = 1  # it stays the second machine, whatever comes
        return (node,), lambda: bool(self._events(events.Draining))


class HostHand(Hand):
    """Also lets the network between hosts fail, and the machine of the control plane.

    Args:
        hosts: host 0 is the control plane's; replicas have those from 1 on, each as many as it has
            nodes.
        lose_machine: ends everything on host 0.
    """

    def __init__(self, hosts: Hosts, lose_machine: Callable[[], None], *of_hand: Any) -> None:
        super().__init__(*of_hand)
        self._hosts, self._lose_machine = hosts, lose_machine
        self._nodes: dict[int, str] = {}

    def _do(self, action: Action) -> Deed:
        for host in range(1, len(self._schedule.homes) + 1):
            there = self._hosts.processes(host)
            for joined in self._events(events.WorkerJoined):
                if joined.pid in there:
                    self._nodes[host] = joined.node
        return super()._do(action)

    def _link(self, action: Action) -> _Done:
        (host,) = self._where(action, 1)
        self._hosts.cut(host)
        self._run.join(action.lasts_s)
        self._hosts.restore(host)
        return self._named(host), lambda: True

    def _mtu(self, action: Action) -> _Done:
        one, other = self._where(action, 2)
        for host, peer in ((one, other), (other, one)):
            self._hosts.lose(host, f"ip saddr {ip_of(peer)} meta length > {LARGE_BYTES}")
        self._run.join(action.lasts_s)
        for host in (one, other):
            self._hosts.lose_nothing(host)
        return self._named(one, other), lambda: True

    def _store(self, action: Action) -> _Done:
        (host,) = self._where(action, 1)
        try:
            port = self._hosts.port_of(self._events(events.CoordinatorStarted)[-1].pid)
        except ValueError:  # it is lost, and the next one is not there
            return (), lambda: True
        self._hosts.lose(host, f"tcp sport {port}")
        self._run.join(action.lasts_s)
        self._hosts.lose_nothing(host)
        return self._named(host), lambda: True

    def _machine(self, _: Action) -> _Done:
        self._lose_machine()
        return (), lambda: True

    def _where(self, action: Action, count: int) -> list[int]:
        first = action.host * self._schedule.nodes
        return [1 + (first + offset) % len(self._schedule.homes) for offset in range(count)]

    def _named(self, *hosts: int) -> tuple[str, ...]:
        return tuple(self._nodes[host] for host in hosts if host in self._nodes)
