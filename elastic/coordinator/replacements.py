"""Machines that are suspect: what speaks against each is remembered, and its provider replaces it.

    worker_lost for a cause that speaks against the machine ┐
    a machine that an earlier run remembers comes           ├─► suspect?
    its platform complains of it                            ┘      │
    "tell" ──────────────────────────────────────────────── told ◄─┤
    too many at once, or in an hour ─── held_back ◄────────────────┤ ◄─ looked at each minute, until
                                                                   │    `elastic nodes clear`
                                                                begun
    no worker gets a place there, Ray places nothing, successors are asked for
    the last worker with a place has left ──► NodeProvider.replace ──► replaced | failed

The run leaves the machine as one that Ray drains, so it never falls below `min_replicas` for it.
Whatever goes wrong here is written down, and harms nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.errors import NoCapacityError, SuspectFileError
from elastic.membership.failure import INCIDENT_S
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import entry_of
from elastic.providers.choice import open_provider
from elastic.providers.node_provider import NodeIdentity, NodeProvider
from elastic.ray_compat.cluster import cluster_address, drain_node, end_node, find_node
from elastic.reporting.suspect_file import SuspectFile
from health.breaker import decide_hold
from health.suspects import Mark, is_suspect

log = logging.getLogger(__name__)

SETTLE_S = INCIDENT_S
"""Before it is decided what becomes of a machine: by then the others that a common cause makes
suspect are known."""
LOOK_S = 60.0
"""How often a machine that is held back is looked at again, and the platform asked."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""Before a provider without capacity is asked again."""

_THREADS = 4

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node, and the machine below it."""

    node: NodeIdentity
    """As Ray knows it."""
    name: str
    """The machine's; where that is not known, the node's."""
    known: bool
    """Whether it is the machine's."""


@dataclass(frozen=True, kw_only=True)
class Ray:
    """What is asked of Ray. Each call may take a while."""

    find: Callable[[str], NodeIdentity]
    """What it knows of a node."""
    drain: Callable[[str, float | None, str], None]
    """`ray_compat.cluster.drain_node`."""


def _identify(node: str) -> NodeIdentity:
    found = find_node(node)
    if found is None:
        return NodeIdentity(node=node, address=node, instance="")
    return NodeIdentity(node=node, address=found.address, instance=found.instance, head=found.head)


class Replacements:
    """Follows the run's events. All methods are immediate; what takes time is done on threads.

    Args:
        config: whom to ask, how often, and where the record of suspects lies.
        membership: knows whether the run is over.
        dispatcher: does the work in the background.
        workers: leave the machine.
        records: tell what happens, and take what became of it.
        provider: instead of that of `config`.
        ray: asked of nodes.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        records: RunLog,
        *,
        provider: NodeProvider | None = None,
        ray: Ray = Ray(find=_identify, drain=drain_node),
    ) -> None:
        self._health, self._run = config.health, config.paths.root.name
        self._membership, self._dispatcher = membership, dispatcher
        self._workers, self._records, self._ray = workers, records, ray
        self._file = SuspectFile(config.paths.root.parent)
        self._provider = provider or open_provider(
            config.health.replace_nodes, end_node=end_node, address=cluster_address
        )
        # Of its own: others must not wait behind a platform that does not answer.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="replacements")
        self._met: dict[str, asyncio.Future[Machine]] = {}
        self._recalled: set[str] = set()
        self._suspected: dict[str, float] = {}
        """Node -> since when, in seconds since the epoch."""
        self._settled: set[str] = set()
        """Those of them for which nothing more is done."""
        self._begun: list[float] = []
        self._unfinished: list[events.NodeReplacement] = []
        self._began = False
        records.followers.append(self.hear)

    def replay(self, happened: Iterable[events.NodeReplacement]) -> None:
        """Takes up what a coordinator before this one has not finished. Told of all that became of
        suspect machines in this start of the run."""
        newest: dict[str, events.NodeReplacement] = {}
        for event in happened:
            self._suspected.setdefault(event.node, event.time)
            newest[event.node] = event
            if event.outcome == "begun":
                self._begun.append(event.time)
        for node, event in newest.items():
            if event.outcome == "cleared":
                del self._suspected[node]
            elif event.outcome in ("begun", "held_back"):
                self._unfinished.append(event)
            else:
                self._settled.add(node)

    def begin(self) -> None:
        """The first worker is there."""
        if self._began:
            return
        self._began = True
        if self._provider is not None:
            self._spawn(self._ask_platform(self._provider))
        for event in self._unfinished:
            self._spawn(self._go_on(event))

    def hear(self, event: events.Event) -> None:
        """Something was written down."""
        if isinstance(event, events.WorkerJoined) and event.node not in self._recalled:
            self._recalled.add(event.node)
            self._spawn(self._recall(event.node))
        elif isinstance(event, events.WorkerLost):
            weight = entry_of(event.cause).against_machine
            if weight:
                self._spawn(self._blame(event.node, event.cause, event.detail, weight))

    # -- what speaks against a machine -------------------------------------------------------------

    async def _recall(self, node: str) -> None:
        """The first worker of a machine has started: what is remembered of it?"""
        record = await self._on_thread(self._file.read)
        if self._provider is None and not record:
            return
        machine = await self._machine(node)
        marks = record.get(machine.name, ())
        if is_suspect(marks, time.time()):
            last = marks[-1]
            await self._suspect(
                machine, f"remembered of run {last.run}: {last.cause}: {last.detail}"
            )

    async def _blame(self, node: str, cause: str, detail: str, weight: float) -> None:
        machine, now = await self._machine(node), time.time()
        mark = Mark(time=now, weight=weight, cause=cause, run=self._run, detail=detail)
        try:
            marks = await self._on_thread(self._file.add, machine.name, mark)
        except (OSError, SuspectFileError) as error:
            log.warning("what speaks against %s is not remembered: %s", machine.name, error)
            marks = (mark,)
        if is_suspect(marks, now):
            await self._suspect(machine, f"{cause}: {detail}")

    async def _ask_platform(self, provider: NodeProvider) -> None:
        """What the platform says of a machine in two looks running speaks against it."""
        before: dict[str, str] = {}
        while await self._goes_on_for(LOOK_S):
            try:
                told = await self._on_thread(provider.complaints)
            except Exception as error:
                log.warning("the platform does not say how its machines are: %s", error)
                continue
            for node in self._workers.nodes:
                name = (await self._machine(node)).name
                if node not in self._suspected and name in told and name in before:
                    await self._blame(node, "platform", told[name], 1.0)
            before = told

    async def _machine(self, node: str) -> Machine:
        if node not in self._met:
            self._met[node] = self._on_thread(self._identify, node)
        return await self._met[node]

    def _identify(self, node: str) -> Machine:
        identity = NodeIdentity(node=node, address=node, instance="")
        try:
            identity = self._ray.find(node)
            if self._provider is None:
                return Machine(node=identity, name=identity.name, known=True)
            name = self._provider.machine_of(identity)
        except Exception as error:
            log.warning("the machine of node %s is not known: %s", node, error)
            return Machine(node=identity, name=identity.name, known=False)
        return Machine(node=identity, name=name, known=True)

    # -- what becomes of it ------------------------------------------------------------------------

    async def _suspect(self, machine: Machine, reason: str) -> None:
        node = machine.node.node
        if node in self._suspected:
            return
        self._suspected[node] = time.time()
        if not await self._goes_on_for(SETTLE_S):
            return
        if self._provider is None:
            held = self._hold()
            detail = "it would be replaced" if held is None else f"it would be held back: {held}"
            self._note(machine, "told", reason, f'health.replace_nodes = "tell"; {detail}')
        elif machine.node.head:
            self._note(machine, "failed", reason, "Ray's head is there: the cluster would end")
        else:
            await self._replace_when_allowed(self._provider, machine, reason)

    async def _go_on(self, event: events.NodeReplacement) -> None:
        machine = await self._machine(event.node)
        if self._provider is None:
            return
        if event.outcome == "begun":
            await self._replace(self._provider, machine, event.reason)
        else:
            await self._replace_when_allowed(self._provider, machine, event.reason)

    async def _replace_when_allowed(
        self, provider: NodeProvider, machine: Machine, reason: str
    ) -> None:
        if (held := self._hold()) is not None:
            self._note(machine, "held_back", reason, held)
        while self._hold() is not None:
            if not await self._goes_on_for(LOOK_S):
                return
            if not await self._still_suspect(machine):
                del self._suspected[machine.node.node]
                self._note(machine, "cleared", reason, "nothing speaks against it any more")
                return
        self._begun.append(time.time())
        self._note(machine, "begun", reason, "it is left by its workers first")
        await self._replace(provider, machine, reason)

    async def _still_suspect(self, machine: Machine) -> bool:
        try:
            record = await self._on_thread(self._file.read)
        except (OSError, SuspectFileError):
            return True
        return is_suspect(record.get(machine.name, ()), time.time())

    def _hold(self) -> str | None:
        open_ = self._suspected.keys() - self._settled
        return decide_hold(
            machines=len(self._workers.nodes | open_),
            suspects=len(open_),
            settled=[self._suspected[node] for node in self._settled],
            begun=self._begun,
            now=time.time(),
            most_per_hour=self._health.max_replacements_per_hour,
        )

    async def _replace(self, provider: NodeProvider, machine: Machine, reason: str) -> None:
        node = machine.node.node
        await self._workers.drain_node(node, None, reason)
        try:
            await self._on_thread(self._ray.drain, node, None, reason)
        except Exception as error:
            log.warning("Ray does not drain node %s: %s", node, error)
        while self._workers.work_on(node):
            if not await self._goes_on_for(1.0):
                return
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                done = await self._on_thread(_ask, provider, machine, reason)
            except NoCapacityError as error:
                self._note(machine, "held_back", reason, f"{error} Asked again in {pause_s:g} s")
            except Exception as error:
                log.exception("%s is not replaced", machine.name)
                self._note(machine, "failed", reason, f"{type(error).__name__}: {error}")
                return
            else:
                await self._forget(machine)
                self._note(machine, "replaced", reason, done)
                return
            if not await self._goes_on_for(pause_s):
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _forget(self, machine: Machine) -> None:
        """It is replaced: its name may come back on another."""
        try:
            await self._on_thread(self._file.clear, machine.name)
        except (OSError, SuspectFileError) as error:
            log.warning("%s is still remembered as suspect: %s", machine.name, error)

    def _note(
        self, machine: Machine, outcome: events.ReplacementOutcome, reason: str, detail: str
    ) -> None:
        if outcome in ("told", "replaced", "failed"):
            self._settled.add(machine.node.node)
        self._records.note(
            events.NodeReplacement(
                time=time.time(),
                node=machine.node.node,
                machine=machine.name,
                outcome=outcome,
                reason=reason,
                detail=detail,
            )
        )

    # -- in the background -------------------------------------------------------------------------

    async def _goes_on_for(self, seconds: float) -> bool:
        """Waits. Returns at once, and False, where the run is over."""
        await self._dispatcher.until(lambda: self._membership.stopped is not None, seconds)
        return self._membership.stopped is None

    def _on_thread(
        self, function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> asyncio.Future[_Result]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, partial(function, *args, **kwargs))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._dispatcher.spawn(_harmless(work))


def _ask(provider: NodeProvider, machine: Machine, reason: str) -> str:
    name = machine.name if machine.known else provider.machine_of(machine.node)
    return provider.replace(machine.node, name, reason)


async def _harmless(work: Coroutine[Any, Any, None]) -> None:
    """A failure in what the dispatcher does ends the run; this one does not."""
    try:
        await work
    except Exception:
        log.exception("a suspect machine is not looked after")
