"""Groups on NCCL are ended at once, each by a thread. NCCL cannot be here: stand-ins record what it
would be told."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.watching import wait_until
from trainer.backend import aborts, groups
from trainer.backend.groups import (
    abandon,
    abort_groups,
    leave_replica_group,
    make_cross_groups,
)
from trainer.backend.rendezvous import Rendezvous, close_connections
from trainer.backend.silence import Connections
from trainer.errors import GroupError

PATIENCE_S = 30.0


@dataclass(eq=False)
class Recorded:
    """A group that notes its end, and may take its time."""

    name: str
    ends: list[tuple[str, str]]
    may_end: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def abort(self) -> None:
        """As c10d's: blocks until it has ended."""
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        self.ends.append((self.name, threading.current_thread().name))


@dataclass(eq=False)
class OnOneDevice:
    """A group whose abort waits for the device, on which kernels of the others spin."""

    device: threading.Barrier
    ended: bool = False

    def abort(self) -> None:
        """Its own kernels end at once; then it waits until all others' have."""
        if not self.ended:
            self.device.wait(PATIENCE_S)
            self.ended = True


class Connecting:
    """A group of NCCL that connects for as long as its peers please, and cannot be ended before."""

    Options = SimpleNamespace
    entered, may_connect, aborted = threading.Event(), threading.Event(), threading.Event()

    def __init__(self, *arguments: Any) -> None:
        self.connected = False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """See c10d."""
        self.entered.set()
        assert self.may_connect.wait(PATIENCE_S)
        self.connected = True

    def alltoall_base(self, *buffers: object) -> None:
        """The first collective of the warm-up."""
        raise AssertionError("its peers may have left, and it would wait for them for ever")

    def abort(self) -> None:
        """As c10d's: there is nothing to end while it connects."""
        if self.connected:
            self.aborted.set()


@pytest.fixture
def ends() -> Iterator[list[tuple[str, str]]]:
    """Group, thread that ended it; in order."""
    yield []
    groups._cross_groups.clear()
    aborts._ends.clear()


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch, ends: list[tuple[str, str]]) -> None:
    """A replica's group on NCCL."""
    there = [True]

    def end() -> None:
        there.clear()
        ends.append(("replica", threading.current_thread().name))

    monkeypatch.setattr(groups, "_on_nccl", lambda: bool(there))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", end)
    monkeypatch.setattr(groups, "_aborted", threading.Event())


def make(name: str, ends: list[tuple[str, str]], *, quick: bool = True) -> Recorded:
    group = Recorded(name, ends)
    if quick:
        group.may_end.set()
    groups._cross_groups.append(group)
    return group


def names(asked: list[Future[Any]], ends: list[tuple[str, str]]) -> set[str]:
    """What has ended when all that was asked for is done; not on the thread that asked."""
    for end in asked:
        end.result(PATIENCE_S)
    assert {thread.partition("_")[0] for _, thread in ends} <= {aborts.THREAD}
    assert len(ends) == len({name for name, _ in ends}), "each once"
    return {name for name, _ in ends}


def test_a_call_ends_the_groups_across_replicas_and_the_replica_s(
    ends: list[tuple[str, str]], replica: None
) -> None:
    make("cross", ends)
    asked = abort_groups(replica=Connections())
    leave_replica_group()
    assert names(asked, ends) == {"cross", "replica"}


def test_a_call_that_comes_late_leaves_the_next_replica_alone(
    ends: list[tuple[str, str]], replica: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has come to its turn when that is made."""
    former = groups.replica_connections()
    monkeypatch.setattr(groups, "end_replica_collectives", lambda: None)
    leave_replica_group()
    assert names(abort_groups(replica=former), ends) == set()
    assert names(abort_groups(replica=groups.replica_connections()), ends) == {"replica"}


def test_no_abort_waits_for_a_group_that_is_aborted_after_it(
    ends: list[tuple[str, str]], replica: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else none of them would come to its end."""
    device = threading.Barrier(3)
    cross, default, split = (OnOneDevice(device) for _ in range(3))
    groups._cross_groups.append(cross)
    known: Any = dist.distributed_c10d._world.pg_names
    for name, group in (("0", default), ("1", split)):
        monkeypatch.setitem(known, group, name)
    assert names(abort_groups(replica=Connections()), ends) == {"replica"}
    assert cross.ended and default.ended and split.ended


class Threads:
    """Lets what was started run, if it will, before it starts more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *begun: threading.Event) -> None:
        self.begun, self.early, self.start = begun, False, aborts._start
        monkeypatch.setattr(aborts, "_start", self.start_and_look)

    def start_and_look(self, run: Callable[[], None]) -> threading.Thread:
        """In place of `start`."""
        thread = self.start(run)
        self.early |= any(event.wait(0.1) for event in self.begun)
        return thread


def test_no_abort_begins_before_all_have_their_threads(
    ends: list[tuple[str, str]], replica: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has begun may hold up who starts the others."""
    cross, begun = make("cross", ends), threading.Event()
    threads = Threads(monkeypatch, cross.begun, begun)
    monkeypatch.setattr(groups, "_abort_replica_group", lambda replica: begun.set())
    assert names(abort_groups(replica=Connections()), ends) == {"cross"}
    assert begun.is_set() and not threads.early


def test_no_abort_within_a_replica_begins_before_all_have_their_threads(
    ends: list[tuple[str, str]], replica: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, split = make("default", ends), make("split", ends)
    groups._cross_groups.clear()
    known: Any = dist.distributed_c10d._world.pg_names
    for name, group in (("0", default), ("1", split)):
        monkeypatch.setitem(known, group, name)
    threads = Threads(monkeypatch, default.begun, split.begun)
    groups._abort_replica_group(Connections())
    assert {name for name, _ in ends} == {"default", "split", "replica"}
    assert not threads.early


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_how_long_an_abort_took_is_logged(
    seconds: float,
    ends: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a run, where INFO is not shown, if it was long."""
    clock = iter([0.0, seconds])
    monkeypatch.setattr(aborts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    make("cross", ends)
    with caplog.at_level(logging.INFO):
        assert names(abort_groups(replica=None), ends) == {"cross"}
        wait_until(lambda: bool(caplog.records), PATIENCE_S)
    (record,) = caplog.records
    assert record.message == f"the abort of the group across replicas took {seconds:.3f} s"
    assert record.levelname == ("WARNING" if seconds else "INFO")


def test_an_abort_that_fails_is_logged(
    ends: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Who hears calls waits for no end."""

    class Failing:
        def abort(self) -> None:
            raise dist.DistBackendError("Future for ProcessGroup abort timed out")

    groups._cross_groups.append(Failing())
    wait([*abort_groups(replica=None)])
    wait_until(lambda: bool(caplog.records), PATIENCE_S)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the abort of the group across replicas failed after 0." in record.message
    assert "DistBackendError: Future for ProcessGroup abort timed out" in record.message


def test_a_call_for_another_replica_leaves_this_one_s_group(
    ends: list[tuple[str, str]], replica: None
) -> None:
    make("cross", ends)
    assert names(abort_groups(replica=None), ends) == {"cross"}


def test_who_hears_calls_waits_for_no_abort(ends: list[tuple[str, str]], replica: None) -> None:
    """The next call may come while one blocks."""
    cross = make("cross", ends, quick=False)
    asked = abort_groups(replica=Connections()) + abort_groups(replica=Connections())
    assert cross.begun.wait(PATIENCE_S) and "cross" not in dict(ends)
    cross.may_end.set()
    assert names(asked, ends) == {"cross", "replica"}


def test_who_leaves_a_group_waits_for_nothing(ends: list[tuple[str, str]]) -> None:
    """Its kernels end at once; NCCL's threads may need half a second more."""
    cross = make("cross", ends, quick=False)
    asked = abort_groups(replica=None)
    assert abandon(cross, []) and cross.begun.wait(PATIENCE_S) and ends == []
    assert abort_groups(replica=None) == [], "it is no group that a call ends"
    assert not aborts.wait_for_ends(0.01)
    cross.may_end.set()
    assert names(asked, ends) == {"cross"}
    assert aborts.wait_for_ends(PATIENCE_S) and aborts._ends == {}, "and forgotten"


def test_nobody_leaves_the_replica_before_the_abort_has_ended(
    ends: list[tuple[str, str]], replica: None
) -> None:
    """Then the process may end, or be a part of another replica."""
    cross = make("cross", ends, quick=False)
    abandon(cross, [])
    leaver = threading.Thread(target=leave_replica_group)
    leaver.start()
    leaver.join(0.1)
    assert leaver.is_alive()
    cross.may_end.set()
    leaver.join(PATIENCE_S)
    assert not leaver.is_alive() and names([], ends) == {"cross", "replica"}


class Next:
    """A group that notes when it is made."""

    made: ClassVar[list[int]] = []

    def __init__(self, *_: object) -> None:
        self.options = SimpleNamespace()

    class Options:
        """As c10d's."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """The first that takes memory of a GPU."""
        self.made.append(1)

    def abort(self) -> None:
        """As c10d's."""


def leave_it(group: Recorded) -> None:
    """As at a loss."""
    abandon(group, [])


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    """Where a group is made of stand-ins."""
    Next.made.clear()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Next, raising=False)
    monkeypatch.setattr(groups, "torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(groups, "_name_raw_group", lambda *met: None)
    monkeypatch.setattr(groups, "warm_up", lambda *met: None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=store.port, timeout_s=PATIENCE_S)
    close_connections()


class Making(threading.Thread):
    """Makes the next group."""

    def __init__(self, meet: Rendezvous) -> None:
        super().__init__()
        self.meet, self.failed = meet, ""
        self.start()

    def run(self) -> None:
        """On the thread."""
        options: Any = {"rank": 0, "size": 1, "device": "cuda", "leave_now": lambda: False}
        try:
            make_cross_groups(self.meet, "next", **options)
        except GroupError as error:
            self.failed = str(error)


@contextlib.contextmanager
def replica_of(workers: int) -> Iterator[None]:
    """This process is one of so many; 0: it is in none."""
    if workers:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        yield
    finally:
        if workers:
            dist.destroy_process_group()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("end", [leave_it, groups._give_up])
def test_the_next_group_is_made_when_the_abort_of_the_last_one_has_ended(
    end: Callable[[Any], None], workers: int, ends: list[tuple[str, str]], meet: Rendezvous
) -> None:
    """It gets the memory of that one, and has no kernel that what the abort frees may wait for."""
    last = make("last", ends, quick=False)
    if end is groups._give_up:
        abort_groups(replica=None)  # an abort that had nothing to end yet
    end(last)
    with replica_of(workers):
        making = Making(meet)
        making.join(0.3)
        assert making.is_alive() and Next.made == []
        last.may_end.set()
        making.join(PATIENCE_S)
    assert not making.is_alive() and Next.made == [1] and not making.failed


def test_who_is_all_of_a_replica_makes_the_next_group_beside_the_abort(
    ends: list[tuple[str, str]], meet: Rendezvous
) -> None:
    """No kernels of its device wait for others but those of that group."""
    last = make("last", ends, quick=False)
    leave_it(last)
    with replica_of(1):
        making = Making(meet)
        making.join(PATIENCE_S)
    assert not making.is_alive() and Next.made == [1] and not making.failed
    assert last.begun.wait(PATIENCE_S) and ends == []
    last.may_end.set()
    assert aborts.wait_for_ends(PATIENCE_S)


def test_a_group_for_which_there_was_no_memory_fails_when_the_last_one_has_ended(
    ends: list[tuple[str, str]], meet: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then there is some for the next try."""

    def connect(group: Next, device: torch.device) -> None:
        raise dist.DistBackendError("ncclUnhandledCudaError: out of memory")

    monkeypatch.setattr(Next, "eager_connect_single_device", connect)
    last = make("last", ends, quick=False)
    leave_it(last)
    with replica_of(1):
        making = Making(meet)
        making.join(0.3)
        assert making.is_alive()
        last.may_end.set()
        making.join(PATIENCE_S)
    assert not making.is_alive() and "out of memory" in making.failed
    assert aborts.wait_for_ends(PATIENCE_S)


def test_an_abort_that_never_ends_is_told_of(ends: list[tuple[str, str]]) -> None:
    """By the worker whose it is: for the others a peer does not come."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=0.5)
    last = make("last", ends, quick=False)
    abandon(last, [])
    with pytest.raises(GroupError, match="has not ended this worker's former groups"):
        make_cross_groups(meet, "next", rank=0, size=1, device="cuda", leave_now=lambda: False)
    last.may_end.set()
    assert aborts.wait_for_ends(PATIENCE_S)
    close_connections()


class LeftMeanwhile(list[Any]):
    """Groups of which the first is left by another thread while a call looks at them."""

    def __iter__(self) -> Iterator[Any]:
        there = self.copy()
        self.leaver = threading.Thread(target=abandon, args=(self[0], []))
        self.leaver.start()
        self.leaver.join(0.1)  # as far as it comes
        return iter(there)


def test_a_group_that_is_left_at_a_call_is_aborted_once_and_forgotten(
    ends: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = LeftMeanwhile([make("cross", ends)])
    groups._cross_groups.clear()
    monkeypatch.setattr(groups, "_cross_groups", there)
    assert names(abort_groups(replica=None), ends) <= {"cross"}
    there.leaver.join(PATIENCE_S)
    assert aborts.wait_for_ends(PATIENCE_S) and aborts._ends == {}
    assert [name for name, _ in ends] == ["cross"]


def test_a_process_whose_abort_never_ends_can_exit() -> None:
    code = (
        "import threading; from trainer.backend import aborts; "
        "aborts.begin(threading.Event().wait, 'a group of a dead device')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_a_group_that_is_left_while_it_connects_is_ended_when_it_has(
    ends: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that it is left for has ended nothing."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Connecting, raising=False)
    monkeypatch.setattr(groups, "torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(groups, "_name_raw_group", lambda *met: None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=PATIENCE_S)

    def leave_now() -> bool:
        if not Connecting.entered.is_set():
            return False
        abort_groups(replica=None)
        return True

    with pytest.raises(GroupError, match="left for a regroup"):
        make_cross_groups(meet, "cross", rank=0, size=1, device="cuda", leave_now=leave_now)
    Connecting.may_connect.set()
    assert Connecting.aborted.wait(PATIENCE_S)
    close_connections()
    assert aborts.wait_for_ends(PATIENCE_S)
    assert groups._cross_groups == [] and aborts._ends == {}
