"""Whose lease a beat renews; without Ray: no agent is started, only known."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from elastic import HealthConfig
from elastic.coordinator import agents as module
from elastic.coordinator.agents import FIRST_START_S, START_S, NodeAgents
from elastic.protocol.messages import Helper, Identity
from elastic.protocol.rpc import Remote
from health.lease import Reach
from tests.support.sockets import port_that

HEALTH = HealthConfig(node_beat_s=1.0, node_timeout_s=5.0)


WORKER = Identity(worker="w", rank=0, node="n", pid=1)
UPLOADER = Helper(name="uploader", pid=2, born_ticks=3)


class Handle:
    """Of an agent that nobody starts: keeps what it was started with."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def send(self, *_: Any) -> None: ...


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgents]:
    monkeypatch.setattr(module, "start_actor", lambda *_, **__: Handle)
    known = NodeAgents(HEALTH, ("127.0.0.1", 1))
    yield known
    known._socket.close()


def started(agents: NodeAgents, node: str) -> str:
    token = agents.start(node, coordinator=Remote(None))
    assert token is not None
    return token


def next_one(agents: NodeAgents, node: str) -> str:
    return agents.start_next(node, Remote(None), [WORKER])


def lost_after(agents: NodeAgents, beats: int, renew: Any = None) -> dict[str, str]:
    """Nodes that are lost until `beats` more have gone by, each with two looks at the leases, and
    why, as it was seen first."""
    lost: dict[str, str] = {}
    begin_s = 100.0 + agents._clock.awake_s
    for half in range(2 * beats + 1):
        if renew is not None:
            renew()
        lost = agents.overdue(begin_s + half / 2) | lost
    return lost


def test_a_lease_is_kept_by_calls_and_by_datagrams_alike(agents: NodeAgents) -> None:
    called, sent, silent = (started(agents, node) for node in ("called", "sent", "silent"))
    assert agents.renew(called) and agents.renew(silent)
    assert agents.renew(sent) is True

    def both() -> None:
        assert agents.renew(called) and agents.renew(sent)

    assert lost_after(agents, 5, both) == {}
    assert lost_after(agents, 6, both).keys() == {"silent"}


def test_a_pause_of_the_whole_run_hardly_counts(
    agents: NodeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter([100.0, 100.5, 160.5])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    assert [agents.awake_s() for _ in range(3)] == [0.0, 0.5, 1.5]


def test_a_lease_begins_with_the_first_beat(agents: NodeAgents) -> None:
    started(agents, "n")
    assert lost_after(agents, int(FIRST_START_S)) == {}


def test_a_node_whose_first_agent_does_not_beat_is_lost_in_time(agents: NodeAgents) -> None:
    started(agents, "wedged")
    assert lost_after(agents, int(FIRST_START_S) + 1) == {
        "wedged": "its agent has not been heard for 120.5 s"
    }


def test_the_next_agent_has_its_time_though_the_first_never_beat(agents: NodeAgents) -> None:
    started(agents, "n")
    assert lost_after(agents, int(FIRST_START_S)) == {}
    next_one(agents, "n")
    assert lost_after(agents, int(START_S)) == {}
    assert "its agent ended" in lost_after(agents, int(START_S) + 1)["n"]


def test_an_agent_that_was_written_off_hears_so_both_ways(agents: NodeAgents) -> None:
    first = started(agents, "n")
    agents.forget("n")
    second = started(agents, "n")
    assert agents.renew(first) is False and agents.renew(first) is False
    assert agents.renew(second) is True and agents.renew(second) is True


def test_an_agent_of_a_coordinator_that_was_lost_is_not_judged(agents: NodeAgents) -> None:
    assert agents.renew("another-token") is True


def test_another_agent_takes_up_what_the_one_that_ended_has_watched(agents: NodeAgents) -> None:
    first = started(agents, "n")
    agents.watch_helper("n", UPLOADER)
    assert agents.ended("n", first, 0.0) is True
    second = next_one(agents, "n")
    handle: Any = agents._agents["n"].handle
    assert handle.arguments[2] == second
    assert handle.arguments[-2:] == ([WORKER], (UPLOADER,))


def test_the_lease_of_an_agent_that_ended_is_void_and_the_next_one_s_begins_with_its_beat(
    agents: NodeAgents,
) -> None:
    first = started(agents, "n")
    assert agents.renew(first)
    second = next_one(agents, "n")
    assert lost_after(agents, int(START_S)) == {}, "five leases, and it has not beaten yet"
    assert agents.renew(second)
    assert lost_after(agents, 5) == {}
    assert "not heard for 5.5 s" in lost_after(agents, 6)["n"]


def test_a_node_on_which_no_other_agent_beats_is_lost_in_time(agents: NodeAgents) -> None:
    """Also where one after the other is started, and none of them beats."""
    assert agents.renew(started(agents, "n"))
    next_one(agents, "n")
    assert lost_after(agents, int(START_S)) == {}
    next_one(agents, "n")
    assert lost_after(agents, int(START_S) + 1)["n"] == (
        "its agent ended, and none was heard for 30.5 s"
    )


def test_the_last_words_of_an_agent_that_ended_renew_nothing_and_harm_nobody(
    agents: NodeAgents,
) -> None:
    first = started(agents, "n")
    second = next_one(agents, "n")
    assert agents.renew(first) and agents.renew(first), "False: it ends the workers"
    assert lost_after(agents, int(START_S) + 1, lambda: agents.renew(first)).keys() == {"n"}
    agents.forget("n")
    assert not agents.renew(first) and not agents.renew(second)


def test_agents_may_ask_those_of_other_nodes_that_are_there_now(agents: NodeAgents) -> None:
    doors = {node: (f"10.1.0.{number}", 7000) for number, node in enumerate("abc")}
    tokens = {node: started(agents, node) for node in doors}

    def may_ask(node: str) -> set[str]:
        found = agents._meet(tokens[node], doors[node])
        return {other for other, door in doors.items() if door in found}

    assert may_ask("a") == set()
    assert may_ask("b") == {"a"} and may_ask("c") == {"a", "b"}
    assert agents._meet(tokens["a"], ("127.0.0.1", 1)) == [doors["b"], doors["c"]]
    assert may_ask("b") == {"c"}, "nobody on the coordinator's own machine"
    agents.forget("c")
    first = tokens["b"]
    tokens["b"] = next_one(agents, "b")
    assert may_ask("a") == set()
    assert agents._meet(first, doors["b"]) == (), "the last words of one that has ended"
    assert may_ask("a") == set()
    assert may_ask("b") == {"a"} and may_ask("a") == {"b"}


def test_agents_that_keep_ending_are_not_started_again(agents: NodeAgents) -> None:
    token, again = started(agents, "n"), []
    for now_s in (0.0, 10.0, 20.0):
        again.append(agents.ended("n", token, now_s))
        assert agents.ended("n", "another token", now_s) is None
        token = next_one(agents, "n")
    assert again == [True, True, False]
    agents.forget("n")
    assert agents.ended("n", token, 30.0) is None
    assert agents.ended("n", started(agents, "n"), 31.0) is True, "another day"


def test_a_raylet_has_ended_where_its_machine_refuses_or_ray_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(found: Callable[[str], object]) -> bool:
        monkeypatch.setattr(module, "raylet_of", found)
        return module._raylet_has_ended("n")

    def unreachable(node: str) -> None:
        raise ConnectionError

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert not look(lambda node: address)
    assert look(lambda node: address) and look(lambda node: None)
    assert not look(unreachable), "Ray cannot say"


@pytest.mark.parametrize("reach", get_args(Reach))
def test_what_a_machine_answers_tells_its_end_from_that_of_what_ran_there(
    agents: NodeAgents, reach: Reach
) -> None:
    token = started(agents, "n")
    assert not asyncio.run(agents.machine_answers("n")), "where it is is not known"
    with port_that(reach) as door:
        agents._meet(token, door)
        agents.forget("n")
        assert asyncio.run(agents.machine_answers("n")) == (reach != "silent")
