"""The run's node agents, as the coordinator knows them: who holds a lease, and who let it run
out."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from dataclasses import dataclass

from ray import ObjectRef
from ray.exceptions import ActorUnschedulableError, RayError

from elastic.config import HealthConfig
from elastic.coordinator.listening import open_beats
from elastic.node.agent import NodeAgent
from elastic.node.beats import BeatListener, name_of
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.messages import Identity
from elastic.protocol.rpc import Remote
from elastic.ray_compat.cluster import start_actor
from health.laggards import Position
from health.lease import AwakeClock, decide_lost_nodes


@dataclass(frozen=True, kw_only=True)
class _Agent:
    """A node agent."""

    token: str
    """Tells it from others that the node may have had, and signs its datagrams."""
    handle: Remote[NodeAgent]
    """The actor."""


class NodeAgents:
    """At most one agent for each node. All methods are immediate, except `outlive`, `position` and
    `listen`.

    Args:
        health: bounds.
        address: host and port on which the coordinator's process listens.
    """

    def __init__(self, health: HealthConfig, address: tuple[str, int]) -> None:
        self._health, self._address = health, address
        self._coordinator = uuid.uuid4().hex
        self._agents: dict[str, _Agent] = {}
        self._tokens: dict[bytes, str] = {}  # by name of an agent, those of the forgotten too
        self._nodes: dict[str, str] = {}  # by token
        self._renewed_s: dict[str, float] = {}
        self._socket = open_beats(address[0])
        self.check_interval_s = health.node_beat_s / 2
        """How often to call `overdue`."""
        self._clock = AwakeClock(self.check_interval_s)

    async def listen(self) -> None:
        """Takes beats that come as datagrams from now on. Called once, on the event loop."""
        await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: BeatListener(self._tokens, self.renew_by_token), sock=self._socket
        )

    def start(self, node: str, coordinator: Remote[CoordinatorApi]) -> str | None:
        """Starts the node's agent where it has none. Its lease begins with its first beat.

        Returns:
            The new agent's token; None where there is one.
        """
        if node in self._agents:
            return None
        token = f"{self._coordinator}-{secrets.token_hex()}"
        handle = start_actor(NodeAgent, node=node, max_concurrency=8)(
            coordinator,
            node,
            token,
            self._address,
            (self._address[0], self._socket.getsockname()[1]),
            self._health,
        )
        self._agents[node] = _Agent(token=token, handle=handle)
        self._tokens[name_of(token)], self._nodes[token] = token, node
        return token

    def watch(self, identity: Identity) -> ObjectRef[None]:
        """Has a worker watched. Returns what to await until it is."""
        return self._agents[identity.node].handle.send(NodeAgent.watch, identity)

    def signal(self, identity: Identity, number: int) -> None:
        """Sends a signal to a worker's process, where its node has an agent."""
        agent = self._agents.get(identity.node)
        if agent is not None:
            agent.handle.send(NodeAgent.signal, identity.worker, number)

    async def position(self, identity: Identity) -> Position | None:
        """Where a worker is in its work; None where its node's agent does not say."""
        agent = self._agents.get(identity.node)
        if agent is None:
            return None
        asked = agent.handle.send(NodeAgent.position, identity.worker)
        try:
            return await asyncio.wait_for(asked, self._health.node_timeout_s)
        except (RayError, asyncio.TimeoutError):
            return None

    def watch_helper(self, node: str, helper: str, pid: int) -> None:
        """Has a helper (`elastic/node/helpers.py`) watched while its node's agent lasts."""
        agent = self._agents.get(node)
        if agent is not None:
            agent.handle.send(NodeAgent.watch_helper, helper, pid)

    async def outlive(self, node: str) -> str:
        """Waits for the end of the node's agent. Returns what became of it.

        Raises:
            ActorUnschedulableError: Ray starts none there.
        """
        try:
            await self._agents[node].handle.send(NodeAgent.wait)
        except ActorUnschedulableError:
            raise
        except Exception as error:
            return type(error).__name__
        return "it returned"

    def renew(self, node: str, token: str) -> bool:
        """Renews the lease of a node. Returns False for an agent that was forgotten.

        An agent of a coordinator that was lost is not for this one to judge: it ends with its
        owner, and the node's workers are watched by another.
        """
        if not token.startswith(self._coordinator):
            return True
        return self._renew(node, token)

    def renew_by_token(self, token: str) -> bool:
        """As `renew`, for the agent that has signed a datagram."""
        return self._renew(self._nodes[token], token)

    def _renew(self, node: str, token: str) -> bool:
        agent = self._agents.get(node)
        if agent is None or agent.token != token:
            return False
        self._renewed_s[node] = self._clock.awake_s
        return True

    def overdue(self, now_s: float) -> dict[str, float]:
        """Nodes whose lease has run out by `now_s` of the monotonic clock, with its age."""
        awake_s = self._clock.tick(now_s)
        return decide_lost_nodes(self._renewed_s, awake_s, self._health.node_timeout_s)

    def forget(self, node: str, token: str | None = None) -> bool:
        """Forgets the node's agent; with `token`, only that one. Returns whether it was known."""
        agent = self._agents.get(node)
        if agent is None or token not in (None, agent.token):
            return False
        del self._agents[node]
        self._renewed_s.pop(node, None)
        return True
