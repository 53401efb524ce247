"""Whose exception it was: a peer's loss, or the worker's own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from elastic.config import HealthConfig
from elastic.coordinator import trouble as module
from elastic.coordinator import workers as workers_module
from elastic.coordinator.trouble import Troubles
from elastic.protocol import events
from elastic.protocol.causes import (
    COLLECTIVE,
    CRASH,
    DATA,
    DEVICE_ASSERT,
    GPU_ERROR,
    GPU_MEMORY,
    NETWORK,
    OUT_OF_MEMORY,
    STORAGE,
    USER_ERROR,
    Cause,
    entry_of,
)
from tests.support.coordinator_desk import Agents, CoordinatorDesk

PATIENCE_S = 30.0


class Lost:
    """Keeps who was lost for what."""

    def __init__(self) -> None:
        self.causes: list[Cause] = []

    async def lose(self, worker: str, cause: Cause, *_: object) -> None:
        """See Workers."""
        self.causes.append(cause)


class Unexplained:
    """No connection fails."""

    async def explain(self, worker: str) -> None:
        """See LinkTests."""


class Now:
    """Looks once."""

    async def until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """See Dispatcher."""


def settle(
    cause: Cause, *, broken: bool, followers: Sequence[str] = (), formed: int | None = None
) -> tuple[str, list[Cause]]:
    membership: Any = SimpleNamespace(
        places=SimpleNamespace(formation_of=lambda worker: 1, of=lambda worker: None),
        roster=SimpleNamespace(followers=followers),
        replica_broken=lambda worker, formed: broken,
    )
    lost, now, links = Lost(), Now(), Unexplained()
    troubles = Troubles(HealthConfig(), membership, now, lost, links)  # type: ignore[arg-type]
    return asyncio.run(troubles.settle("w0", 3, "a traceback", cause, formed)), lost.causes


@pytest.mark.parametrize("cause", [GPU_ERROR, GPU_MEMORY, DEVICE_ASSERT])
@pytest.mark.parametrize("broken", [False, True])
def test_a_gpu_that_has_failed_is_never_a_peer_s_loss(cause: Cause, broken: bool) -> None:
    """Its process would answer everything with the same error."""
    assert settle(cause, broken=broken) == ("own", [cause])
    assert entry_of(cause).lasts


@pytest.mark.parametrize("broken", [False, True])
def test_nor_is_a_network_that_nccl_does_not_take(broken: bool) -> None:
    assert settle(NETWORK, broken=broken) == ("own", [NETWORK])


@pytest.mark.parametrize("cause", [USER_ERROR, OUT_OF_MEMORY, COLLECTIVE])
def test_another_exception_may_be(cause: Cause) -> None:
    assert settle(cause, broken=True) == ("peer", [])
    assert settle(cause, broken=False) == ("own", [cause])


def test_who_follows_alone_has_no_peer_whose_loss_explains_its_own_code() -> None:
    assert settle(USER_ERROR, broken=True, followers=["w0"]) == ("own", [USER_ERROR])
    assert settle(COLLECTIVE, broken=True, followers=["w0"]) == ("peer", [])
    beside_the_steps = settle(USER_ERROR, broken=True, followers=["w0"], formed=2)
    assert beside_the_steps == ("peer", []), "the replica that it was building is no more"


async def raise_in_turn(
    desk: CoordinatorDesk, workers: Sequence[str], cause: Cause
) -> list[Literal["peer", "own"]]:
    """Each tells of its exception when that of the one before is settled."""
    no_links: Any = None
    troubles = Troubles(HealthConfig(), desk.membership, desk.dispatcher, desk.workers, no_links)
    return [await troubles.settle(worker, 7, "an index", cause) for worker in workers]


@pytest.mark.parametrize(("workers", "ends"), [("ab", False), ("ac", True)])
def test_workers_of_one_replica_that_raise_in_turn_are_one_try(
    tmp_path: Path, workers: str, ends: bool
) -> None:
    """The loss of the first breaks the replica, of which the second tells a moment later."""
    desk = CoordinatorDesk(tmp_path, each=2)
    assert desk.membership.roster.workers == tuple("abcdef")
    assert asyncio.run(raise_in_turn(desk, workers, DEVICE_ASSERT)) == ["own", "own"]
    assert [lost.cause for lost in desk.happened(events.WorkerLost)] == [DEVICE_ASSERT] * 2
    assert (desk.membership.stopped is not None) == ends


def lose_for_storage(desk: CoordinatorDesk, workers: str, *reads: Path) -> list[str]:
    """One after the other does not see the storage while it builds; the run reads `reads`. Returns
    what for they are lost."""
    no_links: Any = None
    known = desk.membership, desk.dispatcher, desk.workers
    troubles = Troubles(HealthConfig(), *known, no_links, tuple(map(str, reads)))

    async def settle_all() -> None:
        for worker in workers:
            told = await troubles.settle(worker, None, "run.json is not there", STORAGE)
            assert told == "own"

    asyncio.run(settle_all())
    return [lost.cause for lost in desk.happened(events.WorkerLost)]


@pytest.mark.parametrize(
    ("here", "cause"), [("readable", STORAGE), ("unreadable", DATA), ("gone", DATA)]
)
def test_machines_that_do_not_see_the_storage_are_to_blame_where_the_coordinator_s_does(
    tmp_path: Path, here: str, cause: str
) -> None:
    """And the run goes on, however many come."""
    desk = CoordinatorDesk(tmp_path, spares="xyz")
    desk.membership.lose("c")
    for worker in "ab":
        desk.join(worker, built=desk.built[worker], step=0)
    assert "x" in desk.built, "it builds what is lost"
    index = tmp_path / "index.json"
    if here == "readable":
        index.touch()
    elif here == "unreadable":
        index.mkdir()  # EISDIR, as a server may tell of a file and give EIO
    assert lose_for_storage(desk, "xyz", index) == [cause] * 3
    assert desk.membership.stopped is None
    assert bool(entry_of(cause).against_machine) == (here == "readable")


def test_storage_that_none_sees_any_more_is_no_bug_of_the_run(tmp_path: Path) -> None:
    """Also where no replica stands."""
    desk = CoordinatorDesk(tmp_path, spares="xyz")
    for worker in "abc":
        desk.membership.lose(worker)
    for worker in "xyz":
        desk.join(worker)
    assert lose_for_storage(desk, "xyz", tmp_path / "index.json") == [DATA] * 3
    assert desk.membership.stopped is None


def test_storage_that_none_has_seen_soon_ends_the_run_as_a_wrong_setting(tmp_path: Path) -> None:
    desk = CoordinatorDesk(tmp_path, building=True)
    assert lose_for_storage(desk, "ab") == [USER_ERROR] * 2
    stopped = desk.membership.stopped
    assert stopped is not None and stopped.cause == USER_ERROR
    assert "run.json is not there" in (stopped.error or "")


class Beats(Agents):
    """The next agent of node B has been started; it may beat at the `first` question."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self._first, self.asked = first, asyncio.Event()
        self._questions = 0

    def beats(self, node: str) -> bool:
        if node != "B":
            return True
        self._questions += 1
        self.asked.set()
        return self._questions >= self._first


@pytest.mark.parametrize(
    ("first", "dies", "meaning"),
    [
        pytest.param(math.inf, True, "peer", id="it tells of a mate's end"),
        pytest.param(3, False, "own", id="it has nothing to tell"),
        pytest.param(math.inf, False, "own", id="none beats"),
    ],
)
def test_while_a_mate_has_no_agent_a_failed_collective_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: float, dies: bool, meaning: str
) -> None:
    """A mate that ended together with its node's agent is told of by the next one."""
    monkeypatch.setattr(module, "_PEER_LOSS_PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "START_S", PATIENCE_S if dies or first < math.inf else 0.3)
    agents = Beats(first)
    desk = CoordinatorDesk(tmp_path, each=2, agents=agents)
    health = HealthConfig(node_beat_s=0.02, node_timeout_s=0.05)
    no_links: Any = Unexplained()
    troubles = Troubles(health, desk.membership, desk.dispatcher, desk.workers, no_links)

    async def run() -> str:
        settled = asyncio.create_task(troubles.settle("a", 7, "a timeout", COLLECTIVE))
        asked = asyncio.create_task(agents.asked.wait())
        await asyncio.wait([settled, asked], return_when=asyncio.FIRST_COMPLETED)
        if dies:
            await desk.workers.lose("b", CRASH, "its process ended")
        return await settled

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S)) == meaning
    assert agents.asked.is_set()


class Refused(Agents):
    """Node B's has ended, and Ray starts no other one there; the others beat."""

    def __init__(self) -> None:
        super().__init__()
        self.beating = {"A", "C", "D", "E", "F"}

    async def outlive(self, node: str) -> tuple[str, str]:
        """See NodeAgents."""
        return "refused", "it is drained"

    def ended(self, node: str, token: str, now_s: float) -> bool:
        """See NodeAgents."""
        return True

    def forget(self, node: str) -> None:
        """See NodeAgents."""


def test_a_mate_on_a_node_that_ray_drains_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No agent comes there; Ray tells of its end."""
    monkeypatch.setattr(module, "_PEER_LOSS_PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "START_S", 2 * PATIENCE_S)
    monkeypatch.setattr(workers_module, "live_nodes", lambda: {"A", "B"})
    desk = CoordinatorDesk(tmp_path, each=2, agents=Refused())
    health = HealthConfig(node_beat_s=0.02, node_timeout_s=0.05)
    no_links: Any = Unexplained()
    troubles = Troubles(health, desk.membership, desk.dispatcher, desk.workers, no_links)

    async def run() -> str:
        await desk.workers._keep_agent("B", "token")
        return await troubles.settle("a", 7, "a timeout", COLLECTIVE)

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S)) == "own"
    assert [lost.worker for lost in desk.happened(events.WorkerLost)] == ["a"]
