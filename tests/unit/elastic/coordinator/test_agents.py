"""Whose lease a beat renews; without Ray: no agent is started, only known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic import HealthConfig
from elastic.coordinator import agents as module
from elastic.coordinator.agents import NodeAgents
from elastic.protocol.rpc import Remote

HEALTH = HealthConfig(node_beat_s=1.0, node_timeout_s=5.0)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgents]:
    monkeypatch.setattr(module, "start_actor", lambda *_, **__: lambda *_: object())
    known = NodeAgents(HEALTH, ("127.0.0.1", 1))
    yield known
    known._socket.close()


def started(agents: NodeAgents, node: str) -> str:
    token = agents.start(node, coordinator=Remote(None))
    assert token is not None
    return token


def lost_after(agents: NodeAgents, beats: int, renew: Any = None) -> set[str]:
    """Nodes that are lost once `beats` have gone by, each with two looks at the leases."""
    lost: set[str] = set()
    for half in range(2 * beats + 1):
        if renew is not None:
            renew()
        lost |= agents.overdue(100.0 + half / 2).keys()
    return lost


def test_a_lease_is_kept_by_calls_and_by_datagrams_alike(agents: NodeAgents) -> None:
    called, sent, silent = (started(agents, node) for node in ("called", "sent", "silent"))
    assert agents.renew("called", called) and agents.renew("silent", silent)
    assert agents.renew_by_token(sent) is True

    def both() -> None:
        assert agents.renew("called", called) and agents.renew_by_token(sent)

    assert lost_after(agents, 5, both) == set()
    assert lost_after(agents, 6, both) == {"silent"}


def test_a_lease_begins_with_the_first_beat(agents: NodeAgents) -> None:
    started(agents, "n")
    assert lost_after(agents, 20) == set()


def test_an_agent_that_was_written_off_hears_so_both_ways(agents: NodeAgents) -> None:
    first = started(agents, "n")
    agents.forget("n")
    second = started(agents, "n")
    assert agents.renew("n", first) is False and agents.renew_by_token(first) is False
    assert agents.renew("n", second) is True and agents.renew_by_token(second) is True


def test_an_agent_of_a_coordinator_that_was_lost_is_not_judged(agents: NodeAgents) -> None:
    assert agents.renew("n", "another-token") is True
