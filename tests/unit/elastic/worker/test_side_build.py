"""What is built beside the steps: it is given up without a wait, and what it fails with is told."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from elastic.worker.side_build import SideBuild
from elastic.worker.worker import Worker
from health.heartbeat import Heartbeat, HeartbeatReader
from trainer.backend.groups import leave_replica_group
from trainer.errors import GroupError

PATIENCE_S = 30.0


class Builds:
    """A worker that follows, and what it builds: a group, and a model in whose making it hears
    nothing until that `may_end`."""

    def __init__(self) -> None:
        self.may_end = {formed: threading.Event() for formed in (5, 6, 7)}
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.making = list[int]()
        self.heartbeat = Heartbeat()
        self.fails = set[int]()
        """Formations whose build raises."""
        self.worker: Any = SimpleNamespace(
            built=0,
            engine="former",
            beside=None,
            given_up=None,
            build_beside=self.build_beside,
            make_engine=self.make_engine,
            link=SimpleNamespace(
                built=lambda formed: self.told.put(("built", formed)),
                builds_beside=self.heartbeat.build_beside,
            ),
            fail_beside=lambda answer, *_: self.told.put(("failed", answer.formed)),
            settle_in=lambda engine, *_: self.told.put(("settled", engine)),
            give_up_beside=lambda: Worker.give_up_beside(self.worker),
        )

    def build_beside(self, answer: Any) -> None:
        """As a worker's own, as the next one is."""
        Worker.build_beside(self.worker, answer)

    def make_engine(self, answer: Any, former: Any, leave_now: Callable[[], bool]) -> Any:
        """As a worker's own."""
        if leave_now():
            raise GroupError("left")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.making.append(answer.formed)
        self.begun.put(answer.formed)
        assert self.may_end[answer.formed].wait(PATIENCE_S)
        self.making.remove(answer.formed)
        if answer.formed in self.fails:
            raise ValueError("no such layer")
        return f"engine {answer.formed}"

    def shown(self) -> bool:
        """Whether the heartbeat shows that a build goes on."""
        reader = HeartbeatReader(os.getpid(), self.heartbeat.fd)
        with contextlib.closing(reader):
            return reader.read().builds_beside

    def tend(self, formed: int, build: int | None) -> None:
        """The worker is told of a roster in which it follows (0), or that has its replica."""
        answer = None if build is None else SimpleNamespace(formed=build)
        run: Any = SimpleNamespace(follows=formed == 0, formed=formed, build=answer)
        Worker.tend_beside(self.worker, run)


@pytest.fixture
def builds() -> Iterator[Builds]:
    made = Builds()
    yield made
    for event in made.may_end.values():
        event.set()
    Worker.close_beside(made.worker)
    leave_replica_group()


@pytest.mark.parametrize("fails", [set(), {5}], ids=["it ends", "it fails"])
def test_steps_go_on_while_a_build_that_was_given_up_comes_to_its_end(
    builds: Builds, fails: set[int]
) -> None:
    """The next one has a group of its own, and is the only one that is heard of."""
    builds.fails = fails
    builds.tend(0, build=5)
    assert builds.begun.get(timeout=PATIENCE_S) == 5
    builds.tend(0, build=None)
    builds.tend(0, build=6)
    assert builds.making == [5] and builds.begun.empty()
    builds.may_end[5].set()
    builds.may_end[6].set()
    assert builds.told.get(timeout=PATIENCE_S) == ("built", 6)
    builds.tend(6, build=None)
    assert builds.told.get(timeout=PATIENCE_S) == ("settled", "engine 6")
    assert builds.told.empty() and builds.worker.given_up is None


def test_of_several_that_were_given_up_in_a_row_the_last_alone_is_built(builds: Builds) -> None:
    builds.tend(0, build=5)
    assert builds.begun.get(timeout=PATIENCE_S) == 5
    builds.tend(0, build=6)
    builds.tend(0, build=7)
    builds.may_end[5].set()
    builds.may_end[7].set()
    assert builds.told.get(timeout=PATIENCE_S) == ("built", 7)
    assert builds.begun.get() == 7 and builds.begun.empty()


def test_the_heartbeat_shows_a_build_until_its_thread_ends(builds: Builds) -> None:
    """Also one that waits for another, which was given up: that one's end hides nothing."""
    assert not builds.shown()
    builds.tend(0, build=5)
    assert builds.begun.get(timeout=PATIENCE_S) == 5 and builds.shown()
    builds.tend(0, build=6)
    builds.may_end[5].set()
    assert builds.begun.get(timeout=PATIENCE_S) == 6 and builds.shown()
    builds.may_end[6].set()
    assert builds.told.get(timeout=PATIENCE_S) == ("built", 6)
    builds.worker.beside._thread.join(PATIENCE_S)
    assert not builds.shown()


def test_who_leaves_its_replica_waits_for_what_was_given_up(builds: Builds) -> None:
    builds.tend(0, build=5)
    assert builds.begun.get(timeout=PATIENCE_S) == 5
    builds.tend(0, build=None)
    leaver = threading.Thread(target=Worker.close_beside, args=[builds.worker])
    leaver.start()
    builds.may_end[5].set()
    leaver.join(PATIENCE_S)
    assert not leaver.is_alive() and not dist.is_initialized() and builds.told.empty()
    assert builds.worker.beside is builds.worker.given_up is None


def test_who_loses_a_peer_waits_for_no_build(builds: Builds) -> None:
    """Its storage may hang; and the next one is built all the same, once it has come to its end."""
    builds.tend(0, build=5)
    assert builds.begun.get(timeout=PATIENCE_S) == 5
    worker = builds.worker
    worker.progress, worker.job = object(), SimpleNamespace(scaling=SimpleNamespace(device="cpu"))
    worker.link.injection = SimpleNamespace(engine=None)
    leaver = threading.Thread(target=Worker.leave_replica, args=[worker], daemon=True)
    leaver.start()
    leaver.join(PATIENCE_S)
    assert not leaver.is_alive() and builds.making == [5] and dist.is_initialized()
    builds.tend(0, build=6)
    builds.may_end[5].set()
    builds.may_end[6].set()
    assert builds.told.get(timeout=PATIENCE_S) == ("built", 6)


def test_one_that_tells_the_coordinator_is_given_up_without_a_wait(builds: Builds) -> None:
    """Which may be away: the call waits for the next one."""
    away, told = threading.Event(), threading.Event()

    def built(formed: int) -> None:
        told.set()
        assert away.wait(PATIENCE_S)

    builds.worker.link.built = built
    builds.may_end[5].set()
    builds.tend(0, build=5)
    assert told.wait(PATIENCE_S)
    beside = builds.worker.beside
    giver = threading.Thread(target=builds.tend, args=[0, None], daemon=True)
    giver.start()
    giver.join(PATIENCE_S)
    try:
        assert not giver.is_alive() and not dist.is_initialized() and beside.engine is None
    finally:
        away.set()


def test_what_was_built_is_let_go_of_where_it_is_given_up(builds: Builds) -> None:
    builds.may_end[5].set()
    builds.tend(0, build=5)
    assert builds.told.get(timeout=PATIENCE_S) == ("built", 5)
    builds.tend(0, build=None)
    assert not dist.is_initialized() and builds.worker.given_up.engine is None


@pytest.mark.parametrize("error", [ValueError, SystemExit, BaseException])
def test_what_is_raised_is_told(error: type[BaseException]) -> None:
    told: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()

    def build(leave_now: Callable[[], bool]) -> Any:
        raise error("no such layer")

    answer: Any = None
    shown: queue.SimpleQueue[bool] = queue.SimpleQueue()
    done, failed = lambda: told.put(("done",)), lambda *f: told.put(f)
    beside = SideBuild(answer, build, done, failed, shown.put)
    what, origin = told.get(timeout=PATIENCE_S)
    assert f"{error.__name__}: no such layer" in what and origin == "code"
    beside.close()
    assert [shown.get(), shown.get()] == [True, False]
