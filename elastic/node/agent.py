"""One actor per node: it watches the node's workers, and it is the node's word that it is there.

It renews the node's lease with a datagram every `health.node_beat_s` (`beats.py`), in which the
paces of its workers go along. It tells the
coordinator of every worker that ended or froze (`process_watch.py`), at once, in a call that renews
the lease too; what was not acknowledged is told again. Where datagrams are not answered, be it that
a firewall drops them, the call is made for the renewal alone. It kills frozen helpers as well.

Where no renewal comes through for the length of a lease, and the coordinator's machine is silent,
the node is cut off: the coordinator has written its workers off, or is about to. So the agent kills
them; they neither train on nor publish anything. Two things look alike and are not: a machine that
refuses to connect is there and has lost the coordinator's process; and one that nobody hears, as
the agents of other nodes say (`witnesses.py`), is itself gone. The coordinator that is started in
its place takes the run up from these very workers, and this agent ends with its owner, once Ray has
seen the loss. The other way round, an agent that was written off hears so in the answer to its next
call, ends what is left, and itself.

    lease runs out at the coordinator: its workers are lost, it is forgotten ──► False to its beats
    lease runs out here ──► connects, asks others ──► cut off: the workers are killed, their deaths
                                                      wait to be told

An agent whose own process ends costs nobody anything: the coordinator starts another, which takes
the same workers and helpers up and reports those that have ended in between.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import ray
from ray import ObjectRef

from elastic.config import HealthConfig
from elastic.doctor.finding import Finding
from elastic.node.beats import BeatSender
from elastic.node.gpu_gauges import GpuGauges
from elastic.node.health_watch import own_names, start_health_watch
from elastic.node.link_door import LinkDoor
from elastic.node.preflight import check_under_load, start_preflight
from elastic.node.process_watch import ProcessWatch, last_words
from elastic.node.witnesses import WitnessStand, ask
from elastic.protocol.causes import HANG, NODE
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.events import WorkerJoined
from elastic.protocol.messages import Death, Evidence, Helper, Identity
from elastic.protocol.rpc import Remote
from elastic.providers.node_watches import start_watches
from elastic.providers.tell import tell_coordinator
from elastic.ray_compat.cluster import drain_node
from elastic.reporting.outputs import read_files
from health.lease import AwakeClock, Reach, decide_cut_off, decide_gone
from health.progress import Place
from health.reading import Reading
from health.verdict import Sign
from trainer.backend.link_exchange import Address

_SAMPLE_INTERVAL_S = 0.2
_TELL_INTERVAL_S = 0.02
"""How often to look for the answer to a call while news waits for it."""
_PROBE_TIMEOUT_S = 1.0
"""How long an attempt to connect, or the answers of other agents, may take."""
_ASKED_AT_ONCE = 8
"""Workers, for what is found of them."""
_LAST_S = 2.0
"""How long who is asked for the last words of a worker waits for its end, which writes them."""
_READ_S = 2.0
"""How long who is to read what workers wrote waits for another one that does, since that one began.
Both together are shorter than the coordinator waits (`agents.ANSWER_S`)."""
_EVIDENCE_READ_S = 1.0
"""The same for evidence, which waits no longer for its own reading either: a verdict waits."""
_LEAST_READ_S = 0.5
"""How long all of them wait though another one has taken longer: it may be about to end."""
_MOST_UNANSWERED = 2
"""Beats without an answer, before the coordinator is called instead."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What becomes of an attempt to tell a node that is cut off from a coordinator that is gone."""

    reach: Future[Reach]
    """Of the coordinator's machine."""
    asked: int
    """Agents of other nodes."""
    silences_s: Future[list[float]]
    """What those say that have answered."""


class NodeAgent:
    """Watches a node's workers and renews its lease. The coordinator makes one per node at a time.

    Args:
        coordinator: the run's.
        node: Ray's id of this node.
        token: tells this agent from others that the node may have had.
        address: host and port on which the coordinator's process listens.
        beats: host and port of its socket for beats.
        secret: of all agents of this coordinator, by which they know each other.
        health: bounds.
        workers: of this node, which an agent before this one has watched.
        helpers: of this node, likewise.
    """

    def __init__(
        self,
        coordinator: Remote[CoordinatorApi],
        node: str,
        token: str,
        address: tuple[str, int],
        beats: tuple[str, int],
        secret: str,
        health: HealthConfig,
        workers: Iterable[Identity] = (),
        helpers: Iterable[Helper] = (),
    ) -> None:
        self._coordinator, self._node, self._token = coordinator, node, token
        self._address, self._health = address, health
        self._processes = ProcessWatch(health.freeze_timeout_s)
        self._helpers = ProcessWatch(health.freeze_timeout_s)
        self._stand, self._secret = WitnessStand(address, secret), secret
        self._witnesses: tuple[Address, ...] = ()
        self._beats = BeatSender(beats, token, self._stand.port)
        self._door = LinkDoor(address)
        self._clock = AwakeClock(_SAMPLE_INTERVAL_S)
        self._deaths: list[Death] = []
        self._call: ObjectRef[bool] | None = None
        self._told = 0
        """Deaths in that call."""
        self._called_s = 0.0
        self._beat_s = -health.node_beat_s
        self._heard_s = 0.0
        """Awake time up to which the coordinator is known to have been in reach."""
        self._heard_at = self._called_at = time.monotonic()
        """The same on the monotonic clock: others are told no less than the time that went by."""
        self._reads = threading.Lock()
        """Of who reads what workers wrote: a disk that hangs takes one thread, not all that Ray has
        for this actor."""
        self._read_s = inf
        """When that one began; infinite while there is none."""
        self._lookers = ThreadPoolExecutor(2, thread_name_prefix="look")
        self._look: _Look | None = None
        self._run_over = False
        self._waiter = threading.Event()
        for worker in workers:
            self.watch(worker)
        for helper in helpers:
            self.watch_helper(helper)
        self._watches = start_watches(node, self._announce)
        self._readings: Sequence[Reading] = ()
        """The latest of this node's instruments."""
        self._gauges = GpuGauges(node)
        start_health_watch(node, self._processes.states, self._tell_signs, self._keep_readings)
        if health.preflight is True:
            start_preflight(self._tell_findings)
        threading.Thread(target=self._run, name="node-agent", daemon=True).start()

    def check_under_load(self) -> list[Finding]:
        """All that the checks find which load this node; nobody may work on it meanwhile. It takes
        `LOADED_BOUND_S` at most."""

        def begin(check: str, number: int, total: int) -> None:
            self._coordinator.send(CoordinatorApi.node_checking, self._node, check, number, total)

        return check_under_load(begin)

    def _tell_findings(self, findings: list[Finding]) -> None:
        with contextlib.suppress(ray.exceptions.ActorDiedError):
            self._coordinator.call(CoordinatorApi.node_checked, self._node, findings)

    def _announce(self, node: str, deadline_s: float | None, reason: str) -> None:
        """This machine will be taken away: the run leaves it, and Ray looks for another one."""
        tell_coordinator(self._coordinator)(node, deadline_s, reason)
        drain_node(node, deadline_s, reason)

    def _tell_signs(self, signs: list[Sign]) -> None:
        """What stands of this node, told until it is heard: the next change may never come. The
        thread that looks waits so long."""
        with contextlib.suppress(ray.exceptions.ActorDiedError):
            self._coordinator.call(CoordinatorApi.signs_changed, self._node, self._names, signs)

    @cached_property
    def _names(self) -> list[str]:
        """What others may call this node. Whoever asks waits for DNS, which the beats do not."""
        return own_names()

    def watch(self, identity: Identity) -> None:
        """Watches a worker of this node from now on; reports it at once where it has ended."""
        self._processes.watch(
            identity.worker,
            identity.pid,
            identity.heartbeat_fd,
            identity.born_ticks,
            identity.stacks,
            identity.recorder,
            identity.logs,
        )

    def watch_helper(self, helper: Helper) -> None:
        """Watches a helper of this node (`elastic/node/helpers.py`) from now on.

        It is killed where it is frozen; where it ends, those who wait for it know."""
        self._helpers.watch(helper.name, helper.pid, None, helper.born_ticks)

    def signal(self, identity: Identity, number: int) -> None:
        """Sends a signal to the process of a worker of this node, if it still runs. It may have
        been written off before this agent was there to watch it."""
        self.watch(identity)
        self._processes.signal(identity.worker, number)

    def places(self) -> dict[str, Place | None]:
        """Where the workers of this node are in their work."""
        return self._processes.places()

    def evidence(self, workers: Sequence[str]) -> dict[str, Evidence]:
        """What is found of workers of this node, without their output where the disk hangs. They
        are asked at once: each takes its time, and those that do not answer take theirs."""
        until_s = time.monotonic() + _EVIDENCE_READ_S
        written = self._read_aside(workers)
        with ThreadPoolExecutor(_ASKED_AT_ONCE, "evidence") as pool:
            asked = zip(workers, pool.map(self._processes.evidence, workers), strict=True)
            found = {w: self._with_readings(w, one) for w, one in asked if one is not None}
        wait([written], max(0.0, until_s - time.monotonic()))
        logs = written.result() if written.done() else {}
        return {w: replace(one, log=logs.get(w, "")) for w, one in found.items()}

    def _read_aside(self, workers: Sequence[str]) -> Future[dict[str, str]]:
        """What workers wrote last, read on a thread of its own: where the disk hangs, it does."""
        logs = {worker: self._processes.logs_of(worker) for worker in workers}
        written: Future[dict[str, str]] = Future()

        def read() -> None:
            found: dict[str, str] = {}
            try:
                with self._reading(_EVIDENCE_READ_S) as may:
                    if may:
                        found = {w: last_words(files) for w, files in logs.items()}
            finally:  # whoever waits for it need not wait on
                written.set_result(found)

        threading.Thread(target=read, name="read", daemon=True).start()
        return written

    def last_words(self, ended: Sequence[WorkerJoined]) -> dict[str, Evidence]:
        """What is left of workers of this node that have ended, or will: the end of their output,
        and what the instruments showed last; the latter alone where the disk hangs. Nothing of
        those who wrote nothing. It waits a little for their end: who leaves for an exception tells
        of it first, and writes it then."""
        self._processes.wait_ended([one.worker for one in ended], _LAST_S)
        with self._reading(_READ_S) as may:
            written = {one.worker: last_words(one.logs) if may else "" for one in ended}
        return {
            one.worker: Evidence(log=written[one.worker], readings=readings)
            for one, readings in ((one, self._readings_of(one.pid)) for one in ended)
            if written[one.worker] or (readings and not may)
        }

    def output(self, files: Sequence[str], most_bytes: int) -> dict[str, str]:
        """The end of each file that Ray has of workers of this node (`outputs.py`); nothing where
        the disk hangs."""
        with self._reading(_READ_S) as may:
            return read_files(files, most_bytes) if may else {}

    @contextlib.contextmanager
    def _reading(self, bound_s: float) -> Iterator[bool]:
        """Whether one may read what workers wrote, from now on. Another one is waited for until it
        has taken `bound_s`, and for `_LEAST_READ_S`: one that hangs costs nobody more."""
        left_s = self._read_s + bound_s - time.monotonic()
        may = self._reads.acquire(timeout=min(bound_s, max(_LEAST_READ_S, left_s)))
        try:
            if may:
                self._read_s = time.monotonic()
            yield may
        finally:
            if may:
                self._read_s = inf
                self._reads.release()

    def open_link_door(self) -> Address:
        """Where this node listens from now on, for a test of the connections between nodes."""
        return self._door.open()

    def try_links(
        self, rank: int, peers: Mapping[int, Address], bound_s: float
    ) -> dict[int, int] | None:
        """Tries the connections to other nodes, whose agents do the same (`LinkDoor.try_links`)."""
        return self._door.try_links(rank, peers, bound_s)

    def _with_readings(self, worker: str, found: Evidence) -> Evidence:
        pid = self._processes.pid_of(worker)
        return replace(found, readings=() if pid is None else self._readings_of(pid))

    def _readings_of(self, pid: int) -> tuple[Reading, ...]:
        return tuple(reading for reading in self._readings if reading.concerns(pid))

    def _with_all(self, death: Death) -> Death:
        if death.evidence is None:
            return death
        return replace(death, evidence=self._with_readings(death.worker, death.evidence))

    def _keep_readings(self, readings: Sequence[Reading]) -> None:
        self._readings = readings
        self._gauges.show(readings)

    def wait(self) -> None:
        """Does not return before it is called again: a pending call to it fails when this agent is
        lost."""
        before, self._waiter = self._waiter, threading.Event()
        before.set()
        self._waiter.wait()

    def _run(self) -> None:
        try:
            self._work()
        except Exception:
            traceback.print_exc()
            os._exit(1)  # a node must not seem to be watched when it is not

    def _work(self) -> None:
        sampled_s = 0.0
        while True:
            waiting = self._deaths and not self._run_over
            pause_s = _TELL_INTERVAL_S if waiting else _SAMPLE_INTERVAL_S
            self._deaths += self._processes.ended(pause_s)
            now_s = self._clock.tick(time.monotonic())
            if now_s - sampled_s >= _SAMPLE_INTERVAL_S:
                self._deaths += map(self._with_all, self._processes.frozen(now_s))
                self._end_frozen_helpers(now_s)
                sampled_s = now_s
            if not self._run_over:
                self._renew(now_s)
            self._stand.answer(time.monotonic() - self._heard_at)

    def _end_frozen_helpers(self, now_s: float) -> None:
        self._helpers.ended(timeout_s=0)
        for death in self._helpers.frozen(now_s):
            if death.cause == HANG:
                self._coordinator.send(
                    CoordinatorApi.helper_killed, self._node, death.worker, death.detail
                )

    def _renew(self, now_s: float) -> None:
        """Takes the answers that have come, and beats or calls where it is time."""
        self._take_echo()
        self._take_answer()
        beat = now_s - self._beat_s >= self._health.node_beat_s
        if beat:
            self._beats.send(now_s, self._processes.paces())
            self._beat_s = now_s
        unheard = beat and self._beats.unanswered > _MOST_UNANSWERED
        if self._call is None and (self._deaths or unheard):
            self._told = len(self._deaths)
            self._called_s, self._called_at = now_s, time.monotonic()
            self._call = self._coordinator.send(
                CoordinatorApi.beat, self._node, self._token, self._deaths
            )
        silent_s = now_s - self._heard_s
        if silent_s <= self._health.node_timeout_s:
            self._look = None
        elif self._look is None:
            self._look = self._begin_to_look()
        elif self._look.reach.done() and self._look.silences_s.done() and not self._run_over:
            look, self._look = self._look, None
            self._fence(look, silent_s, now_s)

    def _take_echo(self) -> None:
        heard = self._beats.hear()
        if heard is None:
            return
        if not heard.kept:
            self._leave()
        self._witnesses = heard.witnesses
        self._heard_s = max(self._heard_s, heard.sent_s)
        self._heard_at = max(self._heard_at, time.monotonic() - heard.ago_s)

    def _take_answer(self) -> None:
        if self._call is None or not ray.wait([self._call], timeout=0)[0]:
            return
        call, self._call = self._call, None
        try:
            kept = ray.get(call)
        except ray.exceptions.ActorDiedError:
            self._run_over = True  # the coordinator is gone for good; Ray ends the workers
            return
        except ray.exceptions.RayError:
            return  # not reached, or restarting: told again with the next call
        if not kept:
            self._leave()
        del self._deaths[: self._told]
        self._heard_s = max(self._heard_s, self._called_s)
        self._heard_at = max(self._heard_at, self._called_at)

    def _begin_to_look(self) -> _Look:
        """On threads: this one has workers to watch, and others to answer."""
        return _Look(
            reach=self._lookers.submit(find_reach, self._address),
            asked=len(self._witnesses),
            silences_s=self._lookers.submit(ask, self._witnesses, self._secret, _PROBE_TIMEOUT_S),
        )

    def _fence(self, look: _Look, silent_s: float, now_s: float) -> None:
        """Kills the workers where this node is cut off."""
        reach, said_s = look.reach.result(), look.silences_s.result()
        timeout_s = self._health.node_timeout_s
        gone = decide_gone(look.asked, said_s, timeout_s)
        cut_off = decide_cut_off(reach, gone, silent_s, timeout_s)
        if cut_off:
            detail = (
                f"its node could not reach the coordinator for {silent_s:.1f} s "
                f"(health.node_timeout_s = {timeout_s:g}; of {look.asked} other nodes "
                f"{len(said_s)} answered)"
            )
            self._deaths += self._processes.kill_all(NODE, detail)
        if cut_off or reach == "answers":
            self._heard_s = now_s
        if reach == "answers":
            self._heard_at = time.monotonic()

    def _leave(self) -> None:
        """The node was written off: ends its workers and this actor."""
        self._processes.kill_all(NODE, "its node was written off")
        os._exit(0)


def find_reach(address: tuple[str, int]) -> Reach:
    """What becomes of an attempt to connect to `address`, host and port. It may take a second."""
    try:
        socket.create_connection(address, timeout=_PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return "refuses"
    except OSError:
        return "silent"
    return "answers"
