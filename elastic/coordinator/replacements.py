"""What becomes of machines that are suspect: a provider replaces them, where that is allowed.

    a worker was lost for a cause that speaks against it ┐
    an earlier run remembers it                          ├─► suspect (`suspicions.py`)
    its platform complains of it                         │         │
    a verdict calls for it (`remedies.py`)               ┘         │
    "tell" ──────────────────────────────────────────────── told ◄─┤
    too many at once, or in an hour ─── held_back ◄────────────────┤ ◄─ looked at each minute, until
                                                                   │    `elastic nodes clear`
                                                                begun
    no worker gets a place on any of Ray's nodes there, Ray places nothing, successors are asked for
    the last worker with a place has left
    what is being saved from there is written, and what its workers wrote is kept
                                              ──► NodeProvider.replace ──► replaced | failed
                                         or, where a reboot is due and possible ──► rebooted
    told, failed ──► looked at each minute ──► cleared, when nothing speaks against it any more
    rebooted ──► looked at after 15 minutes ──► returned, or suspect again, and to be replaced
    a coordinator that a reboot took with it had asked for that ──► rebooted; perhaps ──► replaced
    begun ──► looked at each minute ──► cleared by `elastic nodes clear`: left, and not replaced

The run leaves the machine as one that Ray drains, so it never falls below `min_replicas` for it.
Whatever goes wrong here is written down, and harms nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace

from elastic.coordinator.aside import Aside
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.suspicions import (
    REBOOT_S,
    Find,
    Live,
    Machine,
    Suspicions,
    identify,
)
from elastic.coordinator.workers import Workers
from elastic.errors import NoCapacityError, ProviderAwayError
from elastic.membership.failure import INCIDENT_S
from elastic.node_config import KubeNodes
from elastic.protocol import events
from elastic.providers.choice import open_provider
from elastic.providers.node_provider import NodeIdentity, NodeProvider
from elastic.ray_compat.cluster import cluster_address, drain_node, end_node, live_nodes
from health.breaker import decide_hold
from health.suspects import SUSPECT
from health.verdict import Step

log = logging.getLogger(__name__)

SETTLE_S = INCIDENT_S
"""Before it is decided what becomes of a machine: by then the others that a common cause makes
suspect are known."""
LOOK_S = 60.0
"""How often a machine that is suspect, and that nothing is done to, is looked at again."""
LEAVE_S = 1.0
"""How often it is looked at whether the last worker has left."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""Before a provider is asked again that has no capacity, or does not answer."""

_STAYS = ("told", "failed")
"""Outcomes after which a machine stays as it is."""

Drain = Callable[[str, float | None, str], None]
"""Has Ray drain a node: `ray_compat.cluster.drain_node`."""


class Replacements:
    """Decides and acts for suspect machines. All methods are immediate.

    Args:
        config: whom to ask, how often, and where the record of suspects lies.
        workers: leave the machine.
        records: tell what happens, and take what became of it.
        aside: where all this is done.
        emptied: waits until what goes with a node is brought away: what is being saved from there,
            and what its workers wrote.
        begun: when replacements of this run began so far, in any start of it, in seconds since the
            epoch.
        provider: instead of that of `config`.
        find: what Ray knows of a node.
        live: the nodes that it believes alive.
        drain: has Ray drain one.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        workers: Workers,
        records: RunLog,
        aside: Aside,
        emptied: Callable[[str], Awaitable[None]],
        *,
        begun: Iterable[float] = (),
        provider: NodeProvider | None = None,
        find: Find = identify,
        live: Live = live_nodes,
        drain: Drain = drain_node,
    ) -> None:
        self._most_per_hour = config.health.max_replacements_per_hour
        self._workers, self._records, self._aside = workers, records, aside
        self._drain, self._emptied = drain, emptied
        nodes = config.health.replace_nodes
        self._kube = isinstance(nodes, KubeNodes)
        self._provider = provider or open_provider(
            nodes, end_node=end_node, address=cluster_address
        )
        self._suspicions = Suspicions(
            config.paths,
            self._provider,
            workers,
            aside,
            self._suspect,
            find,
            live,
            reboots=isinstance(nodes, KubeNodes) and nodes.reboot,
        )
        self._suspected: dict[str, str] = {}
        """Nodes whose machines are suspect, or were -> those machines, each once."""
        self._settled: dict[str, events.NodeReplacement] = {}
        """Those of them for which nothing more is done -> what became of them."""
        self._waiting: dict[str, float] = {}
        """Those of them that have been left and wait for the provider, or cannot be left until
        nothing speaks against them any more -> since when. They hold nobody back."""
        self._begun = list(begun)
        self._unfinished: list[events.NodeReplacement] = []
        self._left: dict[str, float] = {}
        """Nodes of those of them whose replacement had begun -> when."""
        self._began = False
        records.followers.append(self._suspicions.hear)

    def not_lost(self, nodes: Iterable[str], since: float) -> None:
        """See `Suspicions.not_lost`."""
        self._suspicions.not_lost(nodes, since)

    def replay(self, happened: Iterable[events.NodeReplacement]) -> None:
        """Takes up what a coordinator before this one has not finished. Told of all that became of
        suspect machines in this start of the run."""
        newest: dict[str, events.NodeReplacement] = {}
        for event in happened:
            self._suspected[event.node] = event.machine
            newest[event.node] = event
            if event.outcome == "begun":
                self._left[event.node] = event.time
            elif event.outcome != "held_back":
                self._left.pop(event.node, None)
        for node, event in newest.items():
            if event.outcome == "cleared":
                del self._suspected[node]
            elif event.outcome in ("begun", "held_back"):
                self._unfinished.append(event)
            else:
                self._settled[node] = event

    def begin(self) -> None:
        """The first worker is there."""
        if self._began:
            return
        self._began = True
        self._suspicions.begin()
        for event in self._unfinished:
            self._aside.spawn(self._go_on(event))
        for event in self._settled.values():
            self._look_again(event)

    def mend(self, node: str, cause: str, detail: str, weight: float, step: Step) -> None:
        """A verdict calls for a machine step of the ladder. It is remembered as what a loss says of
        a machine is; a `weight` of 0.5 is enough."""
        self._suspicions.accuse(node, cause, detail, weight, step)

    def attends_to(self, node: str) -> bool:
        """Whether a machine is suspect, and is being mended or was: what happens there is met. One
        that is only told of, or could not be replaced, goes on as it is."""
        if not self.acts or node not in self._suspected:
            return False
        settled = self._settled.get(node)
        return settled is None or settled.outcome in ("rebooted", "returned", "replaced")

    def why_not(self, nodes: Collection[str]) -> str | None:
        """Why nothing more is done to any of these machines; None where something may be."""
        settled = [self._settled[node] for node in nodes if node in self._settled]
        failed = [event for event in settled if event.outcome == "failed"]
        if not failed or len(failed) < len(nodes):
            return None
        return "; ".join(f"{event.machine} was not replaced: {event.detail}" for event in failed)

    @property
    def acts(self) -> bool:
        """Whether anything is done, or only told."""
        return self._provider is not None

    async def _suspect(self, machine: Machine, reason: str, step: Step) -> None:
        node = machine.node.node
        if node in self._suspected or machine.name in self._open.values():
            return  # or it is seen to by another of Ray's nodes there
        self._suspected[node] = machine.name
        if not await self._aside.goes_on_for(SETTLE_S):
            return
        if machine.unknown is not None:  # whom to ask was perhaps away
            machine = await self._suspicions.ask_again(machine)
            del self._suspected[node]
            if machine.name in self._open.values():
                return
            self._suspected[node] = machine.name
        if self._provider is None:
            held = self._hold()
            wanted = "replaced" if step == "replace_node" else f"mended ({step})"
            detail = f"it would be {wanted}" if held is None else f"it would be held back: {held}"
            self._note(machine, "told", reason, f'health.replace_nodes = "tell"; {detail}', step)
        elif await self._nodes_to_leave(machine, reason, step):
            await self._replace_when_allowed(self._provider, machine, reason, step)

    async def _go_on(self, event: events.NodeReplacement) -> None:
        machine = await self._suspicions.machine_named(event.node, event.machine)
        if self._provider is None or machine.unknown is not None:
            return
        if event.node in self._left:  # held back since, if at all, by its provider
            await self._go_on_after_begun(self._provider, machine, event)
        elif await self._stands(event) and await self._nodes_to_leave(
            machine, event.reason, event.step
        ):
            await self._replace_when_allowed(self._provider, machine, event.reason, event.step)

    async def _go_on_after_begun(
        self, provider: NodeProvider, machine: Machine, event: events.NodeReplacement
    ) -> None:
        """A machine is not rebooted twice: where nobody knows whether it was, it is replaced."""
        probation = await self._suspicions.probation_of(machine.name, self._left[event.node])
        if probation == "rebooted":
            done = "a coordinator that ended since has asked for it"
            self._note(machine, "rebooted", event.reason, done, event.step)
            return
        step: Step = "replace_node" if probation == "perhaps" else event.step
        await self._replace(provider, machine, replace(event, step=step))

    def _look_again(self, event: events.NodeReplacement) -> None:
        """What is settled so may not stay so. A node of Kubernetes may be back with no pod of the
        cluster's on it: that it is mended is HyperPod's business."""
        if event.outcome in _STAYS:
            self._aside.spawn(self._look_on(event))
        elif event.outcome == "rebooted" and not self._kube:
            self._aside.spawn(self._see_back(event))

    async def _see_back(self, event: events.NodeReplacement) -> None:
        """A machine that does not come back from its reboot is suspect again: by its name, for its
        address may be another's by now."""
        node, back = event.node, None
        machine = await self._suspicions.machine_named(node, event.machine)
        pause_s = max(0.0, event.time + REBOOT_S - time.time())
        while back is None:
            if not await self._aside.goes_on_for(pause_s):
                return
            back, pause_s = await self._suspicions.is_back(machine), LOOK_S
        name = machine.name
        since = (e for e in self._settled.values() if e.machine == name and e.time > event.time)
        if name in self._open.values() or any(since):
            return  # it came back, and is seen to by another of Ray's nodes there
        if back:
            event = replace(
                event, time=time.time(), outcome="returned", detail="Ray has a new node there"
            )
            self._settled[node] = event
            self._records.note(event)
            return
        del self._suspected[node], self._settled[node]
        late = f"Ray has no new node there {REBOOT_S:g} s after its reboot was asked for"
        self.mend(node, "reboot", late, 1.0, "replace_node")

    async def _look_on(self, event: events.NodeReplacement) -> None:
        """A machine stays as it is: it is suspect for as long as something speaks against it, and
        may be told of again later."""
        while await self._aside.goes_on_for(LOOK_S):
            if not await self._stands(event):
                return

    async def _stands(self, event: events.NodeReplacement) -> bool:
        """Whether enough speaks against a machine by now; where not, it is cleared."""
        stands = await self._suspicions.weigh(event.machine) >= SUSPECT
        if not stands:
            self._clear(event)
        return stands

    async def _stands_while_left(self, event: events.NodeReplacement) -> bool:
        """Whether a machine that is being left, or was, is still to be replaced. Where what speaks
        against it has only faded it is: nothing is placed there any more."""
        weight = await self._suspicions.weigh(event.machine)
        if weight < SUSPECT:
            self._waiting.setdefault(event.node, time.time())
        if not weight:
            self._clear(event)
        return weight > 0

    def _clear(self, event: events.NodeReplacement) -> None:
        node = event.node
        self._suspected.pop(node, None)
        self._settled.pop(node, None)
        self._waiting.pop(node, None)
        self._suspicions.hear_platform_again(node)
        detail = "nothing speaks against it any more"
        if node in self._workers.draining_nodes:
            detail += "; nothing is placed there until its Ray node is started anew"
        self._records.note(replace(event, time=time.time(), outcome="cleared", detail=detail))

    async def _nodes_to_leave(
        self, machine: Machine, reason: str, step: Step
    ) -> Sequence[NodeIdentity]:
        """All of Ray's nodes on a machine, as they go with it; none where it is not known what to
        replace, or the cluster would not live on."""
        if machine.unknown is not None:
            self._note(machine, "failed", reason, f"it is not known: {machine.unknown}", step)
            return ()
        nodes = await self._suspicions.nodes_of(machine) or ()
        if any(node.head for node in nodes):
            why = "Ray's head is there: the cluster would end"
            self._note(machine, "failed", reason, why, step)
            return ()
        return nodes

    async def _replace_when_allowed(
        self, provider: NodeProvider, machine: Machine, reason: str, step: Step
    ) -> None:
        if (held := self._hold()) is not None:
            event = self._note(machine, "held_back", reason, held, step)
            while self._hold() is not None:
                if not await self._aside.goes_on_for(LOOK_S):
                    return
                if not await self._stands(event):
                    return
        self._begun.append(time.time())
        event = self._note(machine, "begun", reason, "it is left by its workers first", step)
        await self._replace(provider, machine, event)

    @property
    def _open(self) -> dict[str, str]:
        """Nodes of machines that something is still to be done about -> those machines."""
        return {n: machine for n, machine in self._suspected.items() if n not in self._settled}

    def _hold(self) -> str | None:
        """Each machine counts once, however often Ray was started anew there. One that could not be
        replaced counts as one that was; where the run works on several, they count on as suspect: a
        single one may be so for what is its own, such as Ray's head."""
        open_ = self._open
        newest = {
            event.machine: event
            for event in sorted(self._settled.values(), key=lambda event: event.time)
            if event.machine not in open_.values()
        }
        failed = {event.node for event in newest.values() if event.outcome == "failed"}
        worked_on = failed & self._workers.nodes
        stuck = worked_on if len(worked_on) > 1 else set()
        suspects = (open_.keys() - self._waiting.keys()) | stuck
        gone = [
            event.time
            for event in newest.values()
            if event.node not in stuck and event.outcome != "returned"
        ]
        return decide_hold(
            machines=len(self._workers.nodes | suspects),
            suspects=len(suspects),
            settled=[*gone, *self._waiting.values()],
            begun=self._begun,
            now=time.time(),
            most_per_hour=self._most_per_hour,
        )

    async def _replace(
        self, provider: NodeProvider, machine: Machine, event: events.NodeReplacement
    ) -> None:
        reason, step, pause_s = event.reason, event.step, FIRST_PAUSE_S
        while nodes := await self._leave(machine, event):
            try:
                outcome, done = await self._carry_out(provider, nodes, machine, reason, step)
            except (NoCapacityError, ProviderAwayError) as error:
                again = f"{error} Asked again in {pause_s:g} s"
                event = self._note(machine, "held_back", reason, again, step)
                self._waiting.setdefault(event.node, event.time)
            except Exception as error:
                log.exception("%s is not replaced", machine.name)
                self._note(machine, "failed", reason, f"{type(error).__name__}: {error}", step)
                return
            else:
                self._note(machine, outcome, reason, done, step)
                return
            if not await self._aside.goes_on_for(pause_s):
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _carry_out(
        self,
        provider: NodeProvider,
        nodes: Sequence[NodeIdentity],
        machine: Machine,
        reason: str,
        step: Step,
    ) -> tuple[events.ReplacementOutcome, str]:
        """Reboots a machine where that is due and possible, or replaces it. A reset of a GPU is met
        by a reboot: it needs every process off the GPU, and rights that no worker has."""
        if step in ("reset_gpu", "reboot"):
            before = await self._suspicions.put_on_probation(machine, reason)
            try:
                done = await self._aside.on_thread(provider.reboot, nodes, machine.name, reason)
            except ProviderAwayError:
                raise  # it may have been asked for
            except Exception:
                await self._suspicions.take_from_probation(machine)
                raise
            if done is not None:
                await self._suspicions.rebooted(machine, before)
                return "rebooted", done
            await self._suspicions.take_from_probation(machine)
        done = await self._aside.on_thread(provider.replace, nodes, machine.name, reason)
        await self._suspicions.forget(machine)
        return "replaced", done

    async def _leave(
        self, machine: Machine, event: events.NodeReplacement
    ) -> Sequence[NodeIdentity]:
        """Has the run leave a machine, with all of Ray's nodes there. Returns them; none where it
        is not to be replaced: the run may end before, or the machine be cleared."""
        left: set[str] = set()
        while nodes := await self._nodes_to_leave(machine, event.reason, event.step):
            new = [node.node for node in nodes if node.node not in left]
            for node in new:
                await self._drain_node(node, event.reason)
            left.update(new)
            if not await self._until_left(left, event):
                return ()
            if not new:  # none has come meanwhile
                for node in left:
                    await self._emptied(node)
                return nodes if await self._stands_while_left(event) else ()
        return ()

    async def _drain_node(self, node: str, reason: str) -> None:
        await self._workers.drain_node(node, None, reason)
        try:
            await self._aside.on_thread(self._drain, node, None, reason)
        except Exception as error:
            log.warning("Ray does not drain node %s: %s", node, error)

    async def _until_left(self, nodes: Collection[str], event: events.NodeReplacement) -> bool:
        """Waits until the run has left nodes. Returns whether their machine is to be replaced."""
        looked = time.monotonic()
        while any(map(self._workers.work_on, nodes)):
            if not await self._aside.goes_on_for(LEAVE_S):
                return False
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                if not await self._stands_while_left(event):
                    return False
        return True

    def _note(
        self,
        machine: Machine,
        outcome: events.ReplacementOutcome,
        reason: str,
        detail: str,
        step: Step,
    ) -> events.NodeReplacement:
        event = events.NodeReplacement(
            time=time.time(),
            node=machine.node.node,
            machine=machine.name,
            outcome=outcome,
            reason=reason,
            detail=detail,
            step=step,
        )
        if outcome in (*_STAYS, "rebooted", "replaced"):
            self._settled[event.node] = event
            self._waiting.pop(event.node, None)
        self._records.note(event)
        self._look_again(event)
        return event
