"""What speaks against machines: by this run's losses, by earlier runs, by their platform.

It is remembered for all runs (`reporting/suspect_file.py`), and where it is enough the machine is
suspect. What follows is the business of `replacements.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.coordinator.aside import Aside
from elastic.coordinator.workers import Workers
from elastic.errors import SuspectFileError
from elastic.protocol import events
from elastic.protocol.causes import NODE, RAY_NODE, entry_of
from elastic.protocol.run_paths import RunPaths
from elastic.providers.node_provider import NodeIdentity, NodeProvider
from elastic.ray_compat.cluster import find_node, live_nodes
from elastic.reporting.suspect_file import SuspectFile
from health.suspects import (
    INCIDENT_S,
    REBOOTED,
    REBOOTED_WEIGHT,
    SUSPECT,
    Mark,
    add_mark,
    add_marks,
    is_suspect,
    score,
)
from health.verdict import Step

log = logging.getLogger(__name__)

ASK_S, LONGEST_ASK_S = 60.0, 600.0
"""How often the platform is asked. For what machine a node is, ever more rarely."""

REBOOT_S = 900.0
"""For so long after a reboot was asked for the end of the machine is that reboot: it may come
minutes later, when workers have started there again. Then it should be back."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node, and the machine below it."""

    node: NodeIdentity
    """As Ray knows it."""
    name: str
    """The machine's; where that is not known, the node's."""
    unknown: str | None = None
    """Why it is not known, where it is not."""


Find = Callable[[str], NodeIdentity]
"""What Ray knows of a node, given by its id."""
Live = Callable[[], Sequence[str]]
"""The nodes that Ray believes alive."""


def identify(node: str) -> NodeIdentity:
    """A `Find` that asks Ray.

    Raises:
        LookupError: it knows no such node.
    """
    found = find_node(node)
    if found is None:
        raise LookupError(f"Ray knows no node {node}")
    return NodeIdentity(node=node, address=found.address, instance=found.instance, head=found.head)


def _unknown(node: str) -> NodeIdentity:
    """A node of which no more than its id is known."""
    return NodeIdentity(node=node, address=node, instance="")


class Suspicions:
    """Follows the run's events.

    Args:
        paths: where the run lies, and the record of suspects beside it.
        provider: knows the machines; None: nobody does, and they go by what Ray calls them.
        workers: where there are any.
        aside: where all this is done.
        suspect: told of each machine that is suspect, why, and of the step of the ladder that is
            due; of some more than once.
        find: what Ray knows of a node.
        live: the nodes that Ray believes alive.
        reboots: a machine is rebooted first, whatever its fault asks for.
    """

    def __init__(
        self,
        paths: RunPaths,
        provider: NodeProvider | None,
        workers: Workers,
        aside: Aside,
        suspect: Callable[[Machine, str, Step], Awaitable[None]],
        find: Find = identify,
        live: Live = live_nodes,
        *,
        reboots: bool = False,
    ) -> None:
        self._reboots = reboots
        self._run, self._file = paths.root.name, SuspectFile(paths.root.parent)
        self._provider, self._workers, self._aside = provider, workers, aside
        self._suspect, self._find, self._live = suspect, find, live
        self._met: dict[str, asyncio.Future[Machine]] = {}
        self._recalled: set[str] = set()
        self._warned: set[tuple[str, str]] = set()
        """What was warned of, and of which node."""
        self._blamed: set[str] = set()
        """Nodes that the platform's word was taken against."""
        self._not_lost: dict[str, float] = {}
        """Nodes that a coordinator which was cut off has written off -> since when it may have."""
        self._unwritten: dict[str, tuple[Mark, ...]] = {}
        """What speaks against machines, and could not be remembered for other runs yet."""
        self._writing = asyncio.Lock()
        """Held by who changes the record or that: what is written is written once."""
        self._followed: dict[str, tuple[int, float]] = {}
        """Cause that a program can have -> steps committed at its latest news, and when."""

    def begin(self) -> None:
        """The first worker is there."""
        if self._provider is not None:
            self._aside.spawn(self._ask_platform(self._provider))

    def hear_platform_again(self, node: str) -> None:
        """What the platform says of a machine counts anew, should it say it still."""
        self._blamed.discard(node)

    def not_lost(self, nodes: Iterable[str], since: float) -> None:
        """A coordinator before this one has written these off, since then at the earliest, and was
        cut off itself. Told before their workers join."""
        self._not_lost.update(dict.fromkeys(nodes, since))

    def hear(self, event: events.Event) -> None:
        """Something was written down."""
        if isinstance(event, events.WorkerJoined) and event.node not in self._recalled:
            self._recalled.add(event.node)
            self._aside.spawn(self._recall(event.node))
        elif isinstance(event, events.WorkerLost):
            weight = entry_of(event.cause).against_machine
            if weight and self._is_news(event):
                self.accuse(event.node, event.cause, event.detail, weight)
        elif isinstance(event, events.NodeChecked) and event.isolated:
            self.accuse(event.node, "preflight", event.isolated, 1.0)

    def _is_news(self, event: events.WorkerLost) -> bool:
        """Whether a loss adds anything: not where its fault has followed the work from a loss
        before, with no step in between."""
        if not entry_of(event.cause).by_program:
            return True
        committed = self._workers.committed
        before, since = self._followed.get(event.cause, (None, 0.0))
        if before != committed:
            self._followed[event.cause] = committed, event.time
        return before != committed or event.time - since <= INCIDENT_S

    def accuse(
        self, node: str, cause: str, detail: str, weight: float, step: Step = "replace_node"
    ) -> None:
        """Something speaks against a machine. Where that is enough, `step` is due."""
        self._aside.spawn(self._blame(node, cause, detail, weight, step))

    async def machine_of(self, node: str) -> Machine:
        """The machine below a node, as it was first known."""
        if node in self._met and (await self._met[node]).unknown is not None:
            del self._met[node]
        if node not in self._met:
            self._met[node] = self._aside.on_thread(self._identify, node)
        return await self._met[node]

    async def ask_again(self, unknown: Machine) -> Machine:
        """The machine below a node, which was not known. Where it is now, what speaks against it
        goes by its name."""
        machine = await self.machine_of(unknown.node.node)
        if machine.name != unknown.name:
            for mark in await self._marks_of(unknown.name, kept=True) or ():
                await self._remember(machine.name, mark)
            await self.forget(unknown)
        return machine

    async def machine_named(self, node: str, name: str) -> Machine:
        """The machine below a node that was known by `name`, and may have ended since: its address
        may have gone to another. Ray is asked until it answers: a provider that finds nothing by
        the wrong name takes it for gone. So it is unknown only where the run ends before."""
        self._met[node] = asyncio.ensure_future(self._identify_named(node, name))
        return await self._met[node]

    async def _identify_named(self, node: str, name: str) -> Machine:
        while True:
            try:
                identity = await self._aside.on_thread(self._find, node)
            except LookupError as error:
                log.warning("what node %s was is forgotten: %s", node, error)
                return Machine(node=_unknown(node), name=name)
            except Exception as error:
                log.warning(
                    "Ray does not say what node %s was, and is asked again: %s", node, error
                )
            else:
                return Machine(node=identity, name=name)
            if not await self._aside.goes_on_for(ASK_S):
                return Machine(node=_unknown(node), name=name, unknown="the run has ended")

    async def nodes_of(self, machine: Machine) -> list[NodeIdentity] | None:
        """All of Ray's nodes on a machine; None where the run ends before Ray tells."""
        live = await self._machines()
        if live is None:
            return None
        others = (each for each in live if each.node.node != machine.node.node)
        return [machine.node, *(each.node for each in others if each.name == machine.name)]

    async def is_back(self, machine: Machine) -> bool | None:
        """Whether Ray has a node on a machine that was rebooted, other than those that were left
        before; None where nobody can tell now. A node whose machine is not known may be there where
        it has the same address, which a reboot does not change, or one that is not known either."""
        live = await self._machines()
        if live is None:
            return None
        left = self._workers.draining_nodes | {machine.node.node}
        new = [each for each in live if each.node.node not in left]
        if any(each.name == machine.name for each in new):
            return True
        for node in (each.node for each in new if each.unknown is not None):
            if node.address in (machine.node.address, _unknown(node.node).address):
                return None
        return False

    async def _machines(self) -> list[Machine] | None:
        """Those below the nodes that Ray believes alive; None where the run ends before it tells
        which these are."""
        while True:
            try:
                live = await self._aside.on_thread(self._live)
                break
            except Exception as error:
                log.warning("Ray does not say what nodes it has, and is asked again: %s", error)
            if not await self._aside.goes_on_for(ASK_S):
                return None
        return [await self.machine_of(node) for node in live]

    def _identify(self, node: str) -> Machine:
        identity = _unknown(node)
        try:
            identity = self._find(node)
            name = identity.name if self._provider is None else self._provider.machine_of(identity)
        except Exception as error:
            self._warn_once("the machine of node %s is not known: %s", node, error)
            unknown = f"{type(error).__name__}: {error}"
            return Machine(node=identity, name=identity.name, unknown=unknown)
        return Machine(node=identity, name=name)

    def _warn_once(self, fact: str, node: str, error: Exception) -> None:
        """Of what is tried again and again for a node."""
        if (fact, node) not in self._warned:
            self._warned.add((fact, node))
            log.warning(fact, node, error)

    async def weigh(self, machine: str) -> float:
        """What speaks against a machine by now: it fades, and is 0 where it was cleared. It stays
        enough (`SUSPECT`) while the record cannot be read."""
        marks = await self._marks_of(machine)
        return SUSPECT if marks is None else score(marks, time.time())

    async def _marks_of(self, machine: str, *, kept: bool = False) -> tuple[Mark, ...] | None:
        """What speaks against a machine, as it is to be weighed or as it is `kept`; None where the
        record cannot be read."""
        try:
            record = await self._aside.on_thread(self._file.kept if kept else self._file.read)
        except (OSError, SuspectFileError):
            return None
        return add_marks(record, self._unwritten).get(machine, ())

    async def _remember(self, machine: str, mark: Mark) -> tuple[Mark, ...]:
        """Adds what speaks against a machine, and with it what could not be written before. Returns
        all that speaks against it."""
        async with self._writing:
            unwritten = add_mark(self._unwritten, machine, mark)
            try:
                record = await self._aside.on_thread(self._file.add_all, unwritten)
            except (OSError, SuspectFileError) as error:
                log.warning("what speaks against %s is not remembered yet: %s", machine, error)
                self._unwritten = unwritten
                return await self._marks_of(machine, kept=True) or unwritten[machine]
            self._unwritten = {}
            return record[machine]

    async def forget(self, machine: Machine) -> None:
        """It is replaced: its name may come back on another."""
        async with self._writing:
            self._unwritten.pop(machine.name, None)
            try:
                await self._aside.on_thread(self._file.clear, machine.name)
            except (OSError, SuspectFileError) as error:
                log.warning("%s is still remembered as suspect: %s", machine.name, error)

    async def put_on_probation(self, machine: Machine, reason: str) -> tuple[Mark, ...]:
        """It is about to be rebooted, and this coordinator may go with it: a mark says so, beside
        what speaks against it. Returns that, for `rebooted`."""
        mark = Mark(
            time=time.time(),
            weight=REBOOTED_WEIGHT,
            cause=REBOOTED,
            run=self._run,
            detail=reason,
        )
        *before, _ = await self._remember(machine.name, mark)
        tries = [one for one in before if self._is_reboot(one)]
        if tries:  # its platform was away: the newest stands for them
            await self._take_away(machine.name, lambda one: one in tries)
        return tuple(before)

    async def rebooted(self, machine: Machine, before: Collection[Mark]) -> None:
        """Its reboot was asked for: of what spoke against it `before`, nothing does any more."""
        await self._take_away(machine.name, lambda one: one in before)

    async def take_from_probation(self, machine: Machine) -> None:
        """It is not rebooted."""
        await self._take_away(machine.name, self._is_reboot)

    async def _take_away(self, machine: str, wrong: Callable[[Mark], bool]) -> None:
        async with self._writing:
            unwritten = self._unwritten.pop(machine, ())
            if kept := tuple(mark for mark in unwritten if not wrong(mark)):
                self._unwritten[machine] = kept
            try:
                await self._aside.on_thread(self._file.take_back, machine, wrong)
            except (OSError, SuspectFileError) as error:
                log.warning("%s is still remembered as it was: %s", machine, error)

    async def probation_of(
        self, machine: str, since: float
    ) -> Literal["none", "perhaps", "rebooted"]:
        """Whether this run has asked for a reboot of a machine since then: perhaps, where what
        spoke against it before still does."""
        marks = await self._marks_of(machine, kept=True) or ()
        for index, mark in enumerate(marks):
            if self._is_reboot(mark) and mark.time >= since:
                return "perhaps" if index else "rebooted"
        return "none"

    def _is_reboot(self, mark: Mark) -> bool:
        return mark.cause == REBOOTED and mark.run == self._run

    async def _recall(self, node: str) -> None:
        """The first worker of a machine has started: what is remembered of it? It is looked up
        until that is known, or nobody is there any more, or the run ends."""
        pause_s = ASK_S
        while not await self._is_recalled(node):
            if not await self._aside.goes_on_for(pause_s):
                return
            if node not in self._workers.nodes:
                self._recalled.discard(node)  # whoever starts there has it looked up anew
                return
            pause_s = min(2 * pause_s, LONGEST_ASK_S)

    async def _is_recalled(self, node: str) -> bool:
        """Whether it can be looked up now what is remembered of a machine. Where that is enough, it
        is suspect."""
        try:
            record = await self._aside.on_thread(self._file.read)
            if self._provider is None and not record:
                return True
            machine = await self.machine_of(node)
            if machine.unknown is not None:
                return False  # what is remembered goes by its name, and so does what comes yet
            if node in self._not_lost:
                await self._take_back(machine.name, self._not_lost[node])
                del self._not_lost[node]
                record = await self._aside.on_thread(self._file.read)
        except (OSError, SuspectFileError) as error:
            self._warn_once("what is remembered of node %s is looked up again: %s", node, error)
            return False
        marks = record.get(machine.name, ())
        if is_suspect(marks, time.time()):
            last = marks[-1]
            await self._suspect(
                machine,
                f"remembered of run {last.run}: {last.cause}: {last.detail}",
                self._due(marks, "replace_node"),
            )
        return True

    async def _take_back(self, machine: str, since: float) -> None:
        """A machine was not lost."""

        def wrong(mark: Mark) -> bool:
            return mark.run == self._run and mark.cause == NODE and mark.time >= since

        await self._aside.on_thread(self._file.take_back, machine, wrong)

    async def _blame(self, node: str, cause: str, detail: str, weight: float, step: Step) -> None:
        machine, now = await self.machine_of(node), time.time()
        if cause in (NODE, RAY_NODE) and await self._reboots_now(machine.name, now):
            return
        mark = Mark(time=now, weight=weight, cause=cause, run=self._run, detail=detail)
        marks = await self._remember(machine.name, mark)
        if is_suspect(marks, now):
            await self._suspect(machine, f"{cause}: {detail}", self._due(marks, step))

    async def _reboots_now(self, machine: str, now: float) -> bool:
        marks = await self._marks_of(machine) or ()
        return any(one.cause == REBOOTED and now - one.time < REBOOT_S for one in marks)

    def _due(self, marks: Iterable[Mark], step: Step) -> Step:
        """The step for a machine with these `marks`, by its fault `step`."""
        if any(one.cause == REBOOTED for one in marks):
            return "replace_node"
        return "reboot" if self._reboots else step

    async def _ask_platform(self, provider: NodeProvider) -> None:
        """What the platform says of a machine in two looks running speaks against it."""
        before: dict[str, str] = {}
        while await self._aside.goes_on_for(ASK_S):
            try:
                told = await self._aside.on_thread(provider.complaints)
            except Exception as error:
                log.warning("the platform does not say how its machines are: %s", error)
                continue
            twice = told.keys() & before.keys()
            for node in self._workers.nodes if twice else ():
                name = (await self.machine_of(node)).name
                if node not in self._blamed and name in twice:
                    self._blamed.add(node)
                    self.accuse(node, "platform", told[name], 1.0)
            before = told
