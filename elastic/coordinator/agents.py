"""The run's node agents, as the coordinator knows them: who holds a lease, and who let it run out.

an agent's process ends ──► another one is started, with the workers and helpers to take up
     ──► its first beat begins a new lease
none beats for START_S (the first one: FIRST_START_S), or they keep ending ──► the node is lost
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayError,
)

from elastic.config import HealthConfig
from elastic.coordinator.listening import open_beats
from elastic.coordinator.witness_ring import WitnessRing
from elastic.doctor.finding import Finding
from elastic.node.agent import NodeAgent, find_reach
from elastic.node.beats import BeatListener, Paces, name_of
from elastic.node.preflight import LOADED_BOUND_S
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.events import WorkerJoined
from elastic.protocol.messages import Evidence, Helper, Identity
from elastic.protocol.rpc import RETRY_S, Remote
from elastic.ray_compat.cluster import raylet_of, start_actor
from health.lease import AwakeClock, decide_hopeless, decide_lost_nodes
from health.progress import Place
from trainer.backend.link_exchange import Address

log = logging.getLogger(__name__)

START_S = 30.0
"""How long a node may do without a beat when its agent's process has ended: several times what the
start of another one takes on a busy machine."""

FIRST_START_S = 120.0
"""How long a node's first agent may take until its first beat: at a run's start, and after a
coordinator's loss, those of all nodes start at once."""

ANSWER_S = 5.0
"""How long to wait for what an agent knows of its workers, where they stand still."""

DOOR_S = 1.0
"""How long to wait for what an agent says in a test of connections. Who is later says nothing: it
may have had no core."""

REACH_S = 0.3
"""How long to wait for the kernel of a machine that was given up. Its workers' peers wait, too."""

End = Literal["ended", "node ended", "refused"]
"""What becomes of an agent: its process ended, all of the node's did, or Ray starts it not."""

_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")


@dataclass(kw_only=True)
class _Agent:
    """The agent of a node; one after the other."""

    token: str
    """Tells it from others that the node may have had, and signs its datagrams."""
    handle: Remote[NodeAgent]
    """The actor."""
    helpers: dict[str, Helper] = field(default_factory=dict)
    """What it watches beside workers, by name."""
    renewed_s: float | None = None
    """When its lease was renewed last; None: it has not beaten yet."""
    ended_s: list[float] = field(default_factory=list)
    """When those before it ended."""
    earlier: set[str] = field(default_factory=set)
    """Their tokens."""
    unheard_s: float | None
    """Since when none of them beats: since the first was started, or one has ended."""


class NodeAgents:
    """At most one agent for each node. All methods are immediate but those that are async.

    Args:
        health: bounds.
        address: host and port on which the coordinator's process listens.
    """

    def __init__(self, health: HealthConfig, address: tuple[str, int]) -> None:
        self._health, self._address = health, address
        self._coordinator, self._secret = uuid.uuid4().hex, secrets.token_hex()
        self._agents: dict[str, _Agent] = {}
        self._tokens: dict[bytes, str] = {}  # by name of an agent, those of the forgotten too
        self._nodes: dict[str, str] = {}  # by token
        self._doors: dict[str, Address] = {}
        """Node -> where its agents have answered others; of the forgotten, too."""
        self._socket = open_beats(address[0])
        self._ring = WitnessRing(address[0])
        self.pace_followers: list[Callable[[str, Paces], None]] = []
        """Told of each node's paces, with its beats."""
        self.check_interval_s = health.node_beat_s / 2
        """How often to call `overdue`."""
        self._clock = AwakeClock(self.check_interval_s)

    async def listen(self) -> None:
        """Takes beats that come as datagrams from now on. Called once, on the event loop."""
        await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: BeatListener(self._tokens, self.renew, self._hear_paces, self._meet),
            sock=self._socket,
        )

    def _hear_paces(self, token: str, paces: Paces) -> None:
        for follower in self.pace_followers:
            follower(self._nodes[token], paces)

    def _meet(self, token: str, door: Address) -> Sequence[Address]:
        """The agent with `token` answers others at `door`. Returns where those answer that it may
        ask."""
        node = self._nodes[token]
        self._doors[node] = door
        current = self._agents[node].token == token
        return self._ring.meet(node, door) if current else ()

    # -- agents that start and end -----------------------------------------------------------------

    def start(self, node: str, coordinator: Remote[CoordinatorApi]) -> str | None:
        """Starts the node's agent where it has none. Its lease begins with its first beat.

        Returns:
            The new agent's token; None where there is one.
        """
        if node in self._agents:
            return None
        token, handle = self._start(node, coordinator, (), ())
        self._agents[node] = _Agent(token=token, handle=handle, unheard_s=self._clock.awake_s)
        return token

    def start_next(
        self, node: str, coordinator: Remote[CoordinatorApi], workers: Sequence[Identity]
    ) -> str:
        """Starts another agent in the place of one that has `ended`. It takes up the node's
        `workers`, and the helpers. Returns its token."""
        agent = self._agents[node]
        if agent.unheard_s is None or not agent.earlier:
            agent.unheard_s = self._clock.awake_s
        agent.earlier.add(agent.token)
        self._ring.forget(node)
        agent.renewed_s = None
        helpers = tuple(agent.helpers.values())
        agent.token, agent.handle = self._start(node, coordinator, workers, helpers)
        return agent.token

    def _start(
        self,
        node: str,
        coordinator: Remote[CoordinatorApi],
        workers: Sequence[Identity],
        helpers: Sequence[Helper],
    ) -> tuple[str, Remote[NodeAgent]]:
        token = f"{self._coordinator}-{secrets.token_hex()}"
        self._tokens[name_of(token)], self._nodes[token] = token, node
        beats = self._address[0], self._socket.getsockname()[1]
        start = start_actor(NodeAgent, node=node, max_concurrency=8)
        handle = start(
            coordinator,
            node,
            token,
            self._address,
            beats,
            self._secret,
            self._health,
            workers,
            helpers,
        )
        return token, handle

    async def outlive(self, node: str) -> tuple[End, str]:
        """Waits for the end of the node's agent. Returns what became of it, also in words."""
        handle = self._agents[node].handle
        while True:
            try:
                await handle.send(NodeAgent.wait)
            except ActorUnschedulableError:
                return "refused", "Ray starts none there"
            except ActorUnavailableError:
                # It may live: its lease says whether. But a raylet takes all its processes along.
                if await asyncio.to_thread(_raylet_has_ended, node):
                    return "node ended", "so is its raylet"
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                return "ended", type(error).__name__

    def ended(self, node: str, token: str, now_s: float) -> bool | None:
        """An agent has ended, at `now_s` of the monotonic clock.

        Returns:
            Whether the node should have another one; None where that was not its agent any more.
        """
        agent = self._agents.get(node)
        if agent is None or agent.token != token:
            return None
        agent.ended_s.append(now_s)
        return not decide_hopeless(agent.ended_s)

    def forget(self, node: str) -> None:
        """The node was written off, or can have no agent."""
        self._agents.pop(node, None)
        self._ring.forget(node)

    # -- what agents do ----------------------------------------------------------------------------

    async def watch(self, identity: Identity) -> None:
        """Returns once the agent of its node watches a worker, where there is one."""
        await self._ask(identity.node, NodeAgent.watch, identity)

    async def signal(self, identity: Identity, number: int) -> None:
        """Sends a signal to a worker's process, where its node has an agent."""
        try:
            await self._ask(identity.node, NodeAgent.signal, identity, number)
        except RayError as error:
            log.warning("signal %d does not reach %s: %s", number, identity.worker, error)

    async def places(
        self, nodes: Iterable[str], within_s: float = ANSWER_S
    ) -> dict[str, Place | None]:
        """Where all workers of `nodes` are in their work, as far as the agents say in time."""
        return await _all_of((self._ask(node, NodeAgent.places) for node in nodes), within_s)

    async def evidence(self, identities: Iterable[Identity]) -> dict[str, Evidence]:
        """What is found of workers, as far as the agents say."""
        by_node: dict[str, list[str]] = defaultdict(list)
        for identity in identities:
            by_node[identity.node].append(identity.worker)
        return await _all_of(
            self._ask(node, NodeAgent.evidence, workers) for node, workers in by_node.items()
        )

    async def last_words(self, ended: Iterable[WorkerJoined]) -> dict[str, Evidence]:
        """What is left of workers that have ended, as far as the agents say."""
        by_node: dict[str, list[WorkerJoined]] = defaultdict(list)
        for one in ended:
            by_node[one.node].append(one)
        return await _all_of(
            self._ask(node, NodeAgent.last_words, workers) for node, workers in by_node.items()
        )

    async def output(
        self, node: str, files: Sequence[str], most_bytes: int
    ) -> dict[str, str] | None:
        """The end of each file of workers' output on a node; None where it has no agent."""
        return await self._ask(node, NodeAgent.output, files, most_bytes)

    async def try_links(self, nodes: Sequence[str], bound_s: float) -> dict[tuple[str, str], int]:
        """Has the agents of nodes try the connections between them, all at once.

        Args:
            nodes: some.
            bound_s: how long a message of `LINK_BYTES` may take.

        Returns:
            Sender, receiver -> how much came, where it was not all. Nothing is said of a node whose
            agent did not answer.
        """
        opened = await asyncio.gather(
            *(_within(DOOR_S, self._ask(node, NodeAgent.open_link_door)) for node in nodes)
        )
        doors = {rank: door for rank, door in enumerate(opened) if door is not None}
        tried = [
            self._ask(
                nodes[rank],
                NodeAgent.try_links,
                rank,
                {peer: door for peer, door in doors.items() if peer != rank},
                bound_s,
            )
            for rank in doors
        ]
        answers = await asyncio.gather(*(_within(bound_s + DOOR_S, one) for one in tried))
        short = {rank: a for rank, a in zip(doors, answers, strict=True) if a is not None}
        return {
            (nodes[sender], nodes[receiver]): count
            for receiver, counts in short.items()
            for sender, count in counts.items()
            if sender in short
        }

    async def check_under_load(self, node: str) -> list[Finding] | None:
        """What the checks find that load a node; None where it does not say."""
        return await _within(LOADED_BOUND_S + START_S, self._ask(node, NodeAgent.check_under_load))

    async def _ask(
        self,
        node: str,
        method: Callable[Concatenate[NodeAgent, _Args], _Answer],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Answer | None:
        """Asks the agent of a node; where it ends before it answers, the next one. It must be
        idempotent. None where there is none."""
        while (agent := self._agents.get(node)) is not None:
            try:
                return await agent.handle.send(method, *args, **kwargs)
            except ActorUnschedulableError:
                break
            except RayActorError:
                await asyncio.sleep(RETRY_S)
        return None

    def watch_helper(self, node: str, helper: Helper) -> None:
        """Has a helper (`elastic/node/helpers.py`) watched by its node's agents."""
        agent = self._agents.get(node)
        if agent is not None:
            agent.helpers[helper.name] = helper
            agent.handle.send(NodeAgent.watch_helper, helper)

    async def machine_answers(self, node: str) -> bool:
        """Whether the kernel of a node's machine answers, whatever became of Ray there. Ray is not
        asked: its head may be away."""
        if node not in self._doors:
            return False
        try:
            connecting = asyncio.open_connection(*self._doors[node])
            _, writer = await asyncio.wait_for(connecting, REACH_S)
        except ConnectionRefusedError:  # nobody listens there on TCP
            return True
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True

    # -- leases ------------------------------------------------------------------------------------

    def renew(self, token: str) -> bool:
        """Renews the lease of the node whose agent has `token`. Returns False for an agent that was
        forgotten.

        An agent of a coordinator that was lost is not for this one to judge: it ends with its
        owner, and the node's workers are watched by another.
        """
        if not token.startswith(self._coordinator):
            return True
        agent = self._agents.get(self._nodes[token])
        if agent is None:
            return False
        if agent.token == token:
            agent.renewed_s, agent.unheard_s = self._clock.awake_s, None
            return True
        # Of one that has ended its last words come late. It holds no lease, and is no reason to end
        # the workers of the next one.
        return token in agent.earlier

    def beats(self, node: str) -> bool:
        """Whether the agent of a node holds a lease."""
        agent = self._agents.get(node)
        return agent is not None and agent.renewed_s is not None

    def awake_s(self) -> float:
        """Now, on the clock of the leases. It hardly moves while the coordinator is held up, as
        when its container or machine is paused."""
        return self._clock.tick(time.monotonic())

    def overdue(self, now_s: float) -> dict[str, str]:
        """Nodes that were not heard in time by `now_s` of the monotonic clock, and why not."""
        awake_s, timeout_s = self._clock.tick(now_s), self._health.node_timeout_s
        agents = self._agents.items()
        renewed_s = {node: a.renewed_s for node, a in agents if a.renewed_s is not None}
        first_s = {n: a.unheard_s for n, a in agents if a.unheard_s is not None and not a.earlier}
        next_s = {n: a.unheard_s for n, a in agents if a.unheard_s is not None and a.earlier}
        silent = decide_lost_nodes(renewed_s, awake_s, timeout_s)
        never = decide_lost_nodes(first_s, awake_s, FIRST_START_S)
        late = decide_lost_nodes(next_s, awake_s, START_S)
        limit = f"health.node_timeout_s = {timeout_s:g}"
        why = {n: f"its node was not heard for {s:.1f} s ({limit})" for n, s in silent.items()}
        why |= {n: f"its agent has not been heard for {s:.1f} s" for n, s in never.items()}
        why |= {n: f"its agent ended, and none was heard for {s:.1f} s" for n, s in late.items()}
        return why


async def _within(seconds: float, asked: Coroutine[Any, Any, _Answer | None]) -> _Answer | None:
    """An answer; None where none comes in time."""
    try:
        return await asyncio.wait_for(asked, seconds)
    except (RayError, asyncio.TimeoutError):
        return None


async def _all_of(
    asked: Iterable[Coroutine[Any, Any, Mapping[str, _Answer] | None]],
    within_s: float = ANSWER_S,
) -> dict[str, _Answer]:
    """What several agents say, each of its own workers; of those that do not answer nothing."""
    answers = await asyncio.gather(*(_within(within_s, one) for one in asked))
    return {worker: answer for some in answers if some for worker, answer in some.items()}


def _raylet_has_ended(node: str) -> bool:
    """Ray itself may take half a minute to say so."""
    try:
        address = raylet_of(node)
    except Exception as error:  # Ray may be unreachable for a while
        log.warning("whether the raylet of node %s lives is not known: %s", node, error)
        return False
    return address is None or find_reach(address) == "refuses"
