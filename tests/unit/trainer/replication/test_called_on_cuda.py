"""What a cross group does on CUDA where a call ends its collectives. CUDA cannot be here: the group
is told that it is there, and its collectives are stand-ins, or Gloo's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ErrorType, PrefixStore

from trainer.backend import aborts, groups, polling
from trainer.backend.groups import warm_up
from trainer.backend.rendezvous import Rendezvous
from trainer.errors import CrossGroupLost
from trainer.replication import replicas
from trainer.replication.reduction import _QUEUED, Reduction
from trainer.replication.replicas import CrossGroup, Flight

WORK: Any = _distributed_c10d.WorkResult  # type: ignore[attr-defined]
"""How c10d says that a collective went."""

NOWHERE = Rendezvous(host="127.0.0.1", port=1, timeout_s=30)


class Work:
    """A collective that has ended, or has not: its mark on the device, and c10d's word of it."""

    def __init__(self, *, ended: bool, result: int | None = None) -> None:
        self.ended, self.result = ended, result

    def block_current_stream(self) -> None:
        """See c10d."""

    def query(self) -> bool:
        """As an event of CUDA's."""
        return self.ended

    def get_future_result(self) -> Work:
        """See c10d."""
        return self

    def done(self) -> bool:
        """As a future: c10d has said how it went."""
        return self.result is not None

    def value(self) -> int:
        """As a future."""
        assert self.result is not None
        return self.result

    def is_completed(self) -> bool:
        """See c10d."""
        raise AssertionError("c10d waits for an abort that has begun, with the interpreter in hand")

    def wait(self) -> None:
        """See c10d."""
        raise AssertionError("after an error c10d aborts the group first")


class Raw:
    """A group of NCCL's that has met an error, or has not."""

    def __init__(self, error: ErrorType = ErrorType.SUCCESS) -> None:
        self.error, self.aborted = error, False

    def get_error(self) -> ErrorType:
        """See c10d."""
        return self.error

    def abort(self) -> None:
        """See c10d."""
        self.aborted = True


def posing_group(called: list[str]) -> CrossGroup:
    """A group that takes its device for CUDA. `called` is filled when a fault is announced."""
    cross = CrossGroup(
        NOWHERE,
        "cross",
        lanes=[(0,)],
        total_lanes=1,
        rank=0,
        device="cpu",
        leave_now=lambda: bool(called),
    )
    cross._device = torch.device("cuda")
    cross._mark_end = mark_end  # type: ignore[method-assign]
    return cross


def mark_end(flight: Flight) -> None:
    """What tells of a collective's end is the stand-in itself."""
    flight.end = flight.result = flight.work


def test_a_collective_that_ended_with_a_call_counts_as_lost() -> None:
    """An aborted one ends like another, with anything in its buffers."""
    called: list[str] = []
    cross, flight = posing_group(called), Flight(Work(ended=True), ())
    cross.poll(flight)
    called.append("fault")
    with pytest.raises(CrossGroupLost):
        cross.poll(flight)


def test_a_later_group_has_the_stream_of_the_former() -> None:
    """And with it what the allocator keeps for that stream."""
    assert posing_group([]).stream is posing_group([]).stream


def begin(cross: CrossGroup, work: Work) -> Flight:
    """Has the group begin a collective."""
    cross._groups = [Raw()]
    return cross.start(lambda group: work)


def test_what_has_ended_is_followed_and_what_has_failed_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed one does not end on the device before the group is aborted: nobody waits for it."""
    cross, told = posing_group([]), list[str]()
    cross._on_lost = told.append
    flight = begin(cross, Work(ended=True))
    cross.poll(flight)
    cross.follow(flight)
    flight = begin(cross, Work(ended=False))
    (group,) = cross._groups
    monkeypatch.setattr(groups, "_cross_groups", [group])
    group.error = ErrorType.COMM_ERROR
    with pytest.raises(CrossGroupLost, match="NCCL has met an error"):
        cross.poll(flight)
    assert len(told) == 1
    with pytest.raises(CrossGroupLost, match="NCCL has met an error"):
        cross.start(lambda group: None)


@pytest.mark.parametrize("result", [WORK.COMM_ERROR, WORK.TIMEOUT])
def test_a_failed_collective_that_the_watchdog_has_passed_over_is_lost(result: Any) -> None:
    """It counts no error in the group, and the device never comes to the collective's end."""
    with pytest.raises(CrossGroupLost, match="NCCL has met an error"):
        posing_group([]).poll(Flight(Work(ended=False, result=int(result)), ()))


def test_a_collective_that_c10d_knows_to_have_ended_is_waited_for() -> None:
    """Its mark on the device may come later than that."""
    asked = list[int]()

    class Late(Work):
        def query(self) -> bool:
            asked.append(1)
            return len(asked) > 3

    posing_group([]).poll(Flight(Late(ended=False, result=int(WORK.SUCCESS)), ()))
    assert len(asked) == 4


def test_the_mark_of_a_collective_s_end_is_behind_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a stream of its own: others are ahead, and wait for what it does not."""
    story, cross = list[object](), posing_group([])
    monkeypatch.delattr(cross, "_mark_end")

    class Told(Work):
        def block_current_stream(self) -> None:
            story.append("the stream waits for the collective")

    @contextlib.contextmanager
    def stream(which: Any) -> Iterator[None]:
        story.append(which)
        yield
        story.append("left")

    def mark() -> Work:
        story.append("mark")
        return Work(ended=True)

    monkeypatch.setattr(cross, "_ends", "a stream for ends")
    monkeypatch.setattr(cross, "_streams", SimpleNamespace(stream=stream))
    monkeypatch.setattr(cross, "mark", mark)
    flight = Flight(Told(ended=False), ())
    cross.poll(flight)
    cross.poll(flight)
    assert story == ["a stream for ends", "the stream waits for the collective", "mark", "left"]


DEVICE_ERROR = torch.AcceleratorError("CUDA error: device-side assert triggered")


class OnDeadDevice(Work):
    """A collective on a GPU that answers everything with its error."""

    def query(self) -> bool:
        """See c10d."""
        raise DEVICE_ERROR

    def block_current_stream(self) -> None:
        """See c10d."""
        raise DEVICE_ERROR


@pytest.mark.parametrize("ask", ["start", "poll", "follow"])
def test_a_device_s_error_is_not_told_as_the_group_s(
    ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is this worker's own, and nobody is called away for it."""
    cross, told, raw = posing_group([]), list[str](), Raw()
    cross._on_lost, cross._groups = told.append, [raw]
    flight = Flight(OnDeadDevice(ended=False), ())

    def issue(group: Any) -> Any:
        raise DEVICE_ERROR

    with pytest.raises(torch.AcceleratorError):
        cross.start(issue) if ask == "start" else getattr(cross, ask)(flight)
    assert told == []
    monkeypatch.setattr(groups, "_cross_groups", [raw])
    cross.close()
    assert aborts.wait_for_ends(5) and not raw.aborted, "an abort might never end there"


@pytest.mark.parametrize("error", [DEVICE_ERROR, None])
def test_a_device_that_has_failed_keeps_nobody_from_leaving(
    error: torch.AcceleratorError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leaves for the device's error goes on to close the rest."""

    def wait() -> None:
        raise RuntimeError("what the device was given")

    monkeypatch.setattr(replicas, "lasting_device_error", lambda: error)
    cross, group = posing_group([]), Raw()
    monkeypatch.setattr(cross, "_streams", SimpleNamespace(synchronize=wait))
    monkeypatch.setattr(groups, "_cross_groups", [group])
    cross._groups = [group]
    nothing = contextlib.nullcontext()
    expected = pytest.raises(RuntimeError, match="given") if error is None else nothing
    with expected:
        cross.close()
    aborts.wait_for_ends()


def test_who_leaves_a_group_waits_for_the_kernels_that_have_its_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The abort ends them. The allocator may give the buffers to others when they are let go of."""
    story, cross, told = list[str](), posing_group([]), threading.Event()

    class Group(Raw):
        def abort(self) -> None:
            told.set()

    class Buffer:
        def __del__(self) -> None:
            story.append("free")

    def drain() -> None:
        story.append("drain" if told.wait(5) else "nobody has told the kernels to end")

    monkeypatch.setattr(cross, "_streams", SimpleNamespace(synchronize=drain))
    group = Group()
    monkeypatch.setattr(groups, "_cross_groups", [group])
    buffers: Any = (Buffer(),)
    cross._groups, cross._in_flight = [group], {0: Flight(Work(ended=False), buffers)}
    del buffers
    cross.close()
    assert story == ["drain", "free"]
    aborts.wait_for_ends()


def test_an_abort_that_fails_keeps_nobody_from_leaving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Raw):
        def abort(self) -> None:
            raise dist.DistBackendError("internal error")

    cross, group = posing_group([]), Failing()
    monkeypatch.setattr(groups, "_cross_groups", [group])
    cross._groups = [group]
    cross.close()
    assert aborts.wait_for_ends(5)
    assert "failed after" in caplog.text and "internal error" in caplog.text


def test_nothing_is_begun_after_a_call() -> None:
    """On a group that was aborted it would make another, and wait for its peers."""
    cross, begun = posing_group(["fault"]), list[Any]()
    cross._groups = [Raw()]
    with pytest.raises(CrossGroupLost):
        cross.start(begun.append)
    assert begun == []


def test_a_new_group_does_each_kind_of_collective_once() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> Any:
        own = PrefixStore("g", dist.TCPStore("127.0.0.1", store.port))
        made = dist.ProcessGroupGloo(own, number, 2, timedelta(seconds=30))
        warm_up(made, 2, torch.device("cpu"))
        return made

    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(rank, range(2)))
    assert [group._get_sequence_number_for_group() for group in made] == [4, 4]


class OnCuda(torch.Tensor):
    """Takes itself for one on CUDA."""

    is_cuda = True

    def record_stream(self, stream: Any) -> None:
        """There is none."""


class Aborted(Work):
    """Of a group whose abort has begun: it may have ended with anything in its buffers."""

    def query(self) -> bool:
        """See c10d."""
        raise AssertionError("asked while the group is aborted")


def test_no_collective_is_asked_for_its_end_after_a_call() -> None:
    cross = posing_group(["fault"])
    with pytest.raises(CrossGroupLost, match="left for a regroup"):
        cross.poll(Flight(Aborted(ended=True), ()))


def test_a_call_that_comes_between_two_looks_is_heard_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []

    class Waiting(Work):
        def query(self) -> bool:
            assert not called, "asked while the group is aborted"
            return self.ended

    def sleep(seconds: float) -> None:
        called.append("fault")

    monkeypatch.setattr(polling, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with pytest.raises(CrossGroupLost, match="left for a regroup"):
        posing_group(called).poll(Flight(Waiting(ended=False), ()))


def test_backward_asks_no_collective_for_its_end_after_a_call() -> None:
    called: list[str] = []
    cross = posing_group(called)
    cross.size, cross.rank, cross.total_lanes = 2, 0, 2
    cross.lanes, cross.blocks = [(0,), (1,)], [((0, 1),), ((1, 2),)]
    begun: list[Work] = []

    class Group(Raw):
        def allreduce(self, tensors: list[torch.Tensor]) -> Work:
            begun.append(Aborted(ended=False))
            return begun[-1]

    cross._groups = [Group()]
    into = torch.zeros(8).as_subclass(OnCuda)
    reduction = Reduction(cross, {(0, 1): torch.ones(8)}, into, [4, 8], exact=False)
    reduction.start(4)
    called.append("fault")
    cross._groups = []
    reduction.start(8)
    with pytest.raises(CrossGroupLost, match="left for a regroup"):
        reduction.finish()
    assert len(begun) == 1


def test_backward_takes_no_memory_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, the allocator would wait for the stream that waits for the peer."""
    cross = posing_group([])
    cross.size, cross.rank, cross.total_lanes = 2, 0, 2
    cross.lanes, cross.blocks = [(0,), (1,)], [((0, 1),), ((1, 2),)]
    cross._lost = "a peer is gone"
    into = torch.zeros(8).as_subclass(OnCuda)
    taken = list[int]()
    monkeypatch.setattr(Reduction, "_find_memory", lambda self, count, like: taken.append(count))
    reduction = Reduction(cross, {(0, 1): into}, into, [8], exact=True)
    reduction.start(8)
    with pytest.raises(CrossGroupLost, match="a peer is gone"):
        reduction.finish()
    assert taken == []


@pytest.mark.parametrize("how", ["called away", "failed"])
def test_a_loss_in_backward_is_left_after_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort begins at once, and backward does not wait for it: it may wait for what the replica
    has not begun yet."""
    called, told = list[str](), list[str]()
    cross = posing_group(called)
    cross._on_lost = told.append
    cross.size, cross.rank, cross.total_lanes = 2, 0, 2
    cross.lanes, cross.blocks = [(0,), (1,)], [((0, 1),), ((1, 2),)]
    begun, may_end = threading.Event(), threading.Event()
    ended = list[bool]()

    class Group(Raw):
        def alltoall_base(self, *_: Any) -> Work:
            self.error = ErrorType.COMM_ERROR
            return Work(ended=False)

        def abort(self) -> None:
            begun.set()
            ended.append(may_end.wait(5))

    group = Group()
    monkeypatch.setattr(groups, "_cross_groups", [group])
    cross._groups = [group]
    if how == "called away":
        called.append("fault")
        groups.abort_groups(replica=None)  # as the watch thread has it
    into = torch.zeros(8).as_subclass(OnCuda)
    reduction = Reduction(cross, {(0, 1): torch.ones(8)}, into, [4, 8], exact=True)
    reduction.start(4)
    reduction.start(8)
    assert begun.wait(5) and ended == []
    assert told == (
        [] if called else ["NCCL has met an error in the group across replicas; c10d has logged it"]
    )
    may_end.set()
    with pytest.raises(CrossGroupLost):
        reduction.finish()
    aborts.wait_for_ends()
    assert ended == [True] and groups._cross_groups == [] and not cross.writes_on()


class Queue:
    """The part of a cross group that a plain reduction needs; its collectives end when told."""

    size, rank, blocks, total_lanes = 2, 0, ([(0, 1)], [(1, 2)]), 2
    stream = None

    def __init__(self) -> None:
        self.begun: list[Work] = []
        self.most = 0

    def check(self) -> None:
        """See CrossGroup."""

    def listen(self) -> None:
        """See CrossGroup."""

    def has_ended(self, flight: Flight) -> bool:
        """See CrossGroup."""
        return bool(flight.work.query())

    def on_stream(self) -> Any:
        """See CrossGroup."""
        return contextlib.nullcontext()

    in_backward = on_stream

    def mark(self) -> None:
        """See CrossGroup."""

    def wait_for(self, mark: None) -> None:
        """See CrossGroup."""

    def join_stream(self) -> None:
        """See CrossGroup."""

    def start(self, issue: Any, *buffers: torch.Tensor) -> Flight:
        """See CrossGroup."""
        self.begun.append(Work(ended=False))
        self.most = max(self.most, sum(not work.ended for work in self.begun))
        return Flight(self.begun[-1], buffers)

    def poll(self, flight: Flight) -> None:
        """See CrossGroup. It ends now."""
        flight.work.ended = True

    def follow(self, flight: Flight) -> None:
        """See CrossGroup."""


def test_no_more_is_queued_behind_a_bucket_than_fits() -> None:
    """Backward goes on without a wait, and `finish` begins the rest as others end."""
    buckets, size = 3 * _QUEUED, 4
    cross: Any = Queue()
    into = torch.zeros(buckets * size).as_subclass(OnCuda)
    mine = {(0, 1): torch.ones(buckets * size)}
    ends = [size * (bucket + 1) for bucket in range(buckets)]
    reduction = Reduction(cross, mine, into, ends, exact=False)
    for stop in ends:
        reduction.start(stop)
    assert len(cross.begun) == _QUEUED
    cross.begun[0].ended = True
    reduction.start(ends[-1])
    assert len(cross.begun) == _QUEUED + 1
    reduction.finish()
    assert len(cross.begun) == buckets and all(work.ended for work in cross.begun)
    assert cross.most == _QUEUED


class Exchanges(Queue):
    """And what an exact one needs, of a replica among as many as there are lanes."""

    rank = 0

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.size = self.total_lanes = replicas
        self.blocks = [[(lane, lane + 1)] for lane in range(replicas)]  # type: ignore[assignment]

    def start(self, issue: Any, *buffers: torch.Tensor) -> Flight:
        """See CrossGroup. The all-to-all, which the rest of a bucket follows."""
        return Flight(Work(ended=True), buffers)

    def may_follow(self, flight: Flight) -> bool:
        """See CrossGroup."""
        return True

    def start_gathering(self, whole: torch.Tensor) -> list[Flight]:
        """See CrossGroup."""
        return [super().start(None, whole)]


@pytest.mark.parametrize(("replicas", "queued"), [(2, 16), (32, 16), (64, 10), (1024, 1)])
def test_additions_of_many_replicas_count_among_what_is_queued(replicas: int, queued: int) -> None:
    """A queue holds 1,024 launches; 16 buckets of 64 replicas would have 1,168."""
    buckets, cross = 20, Exchanges(replicas)
    into = torch.zeros(buckets * replicas).as_subclass(OnCuda)
    mine = {(0, 1): torch.ones(buckets * replicas)}
    ends = [replicas * (bucket + 1) for bucket in range(buckets)]
    posing: Any = cross
    reduction = Reduction(posing, mine, into, ends, exact=True)
    for stop in ends:
        reduction.start(stop)
    assert len(cross.begun) == queued
    reduction.finish()
    assert len(cross.begun) == buckets and cross.most == queued
    assert queued == 1 or queued * (10 + replicas - 1) < 1024


class Stream:
    """A queue of the device: how much is in it, and how much of another one it comes after."""

    def __init__(self) -> None:
        self.queued = self.after = 0

    def record_event(self) -> int:
        """See torch."""
        return self.queued

    def wait_event(self, mark: int) -> None:
        """See torch."""
        self.after = max(self.after, mark)

    def wait_stream(self, other: Stream) -> None:
        """See torch."""
        self.wait_event(other.record_event())


@pytest.mark.parametrize("exact", [True, False])
def test_a_bucket_that_was_held_back_waits_for_its_own_gradients_alone(exact: bool) -> None:
    """Not for what backward has queued since, though it is begun later, or after backward."""
    cross, backward, beside = posing_group([]), Stream(), Stream()
    cross.size, cross.rank, cross.total_lanes = 2, 0, 2
    cross.lanes, cross.blocks = [(0,), (1,)], [((0, 1),), ((1, 2),)]
    cross._streams = SimpleNamespace(
        current_stream=lambda: backward, stream=lambda stream: contextlib.nullcontext()
    )
    cross.stream = beside
    in_backward, begun_after = True, list[int]()

    class Running(Work):
        def query(self) -> bool:
            return not in_backward

    class Group(Raw):
        def begin(self, *_: Any) -> Work:
            begun_after.append(beside.after)
            return Running(ended=False)

        allreduce = alltoall_base = begin

        def _allgather_base(self, *_: Any) -> Work:
            return Running(ended=False)

    cross._groups = [Group()]
    groups, of_two = 2 * _QUEUED, 8
    into = torch.zeros(groups * of_two).as_subclass(OnCuda)
    ends = [of_two // 2 * (bucket + 1) for bucket in range(2 * groups)]
    reduction = Reduction(cross, {(0, 1): into}, into, ends, exact=exact)
    for group in range(groups - 1):
        backward.queued = of_two * (group + 1)
        reduction.start(backward.queued)
    assert len(begun_after) < len(ends) - 2
    backward.queued, in_backward = len(into), False
    reduction.finish()
    assert begun_after == [of_two * (bucket // 2 + 1) for bucket in range(2 * groups)]


class Waits(OnCuda):
    """Notes of each copy whether the host waits for it."""

    noted: ClassVar[list[bool]] = []

    def to(self, *to: Any, non_blocking: bool = False) -> Any:  # type: ignore[override]
        self.noted.append(not non_blocking)
        return super().to(to[0], non_blocking=non_blocking)

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        self.noted.append(not non_blocking)
        return super().copy_(other, non_blocking)


def test_lanes_that_wait_on_the_host_hold_nobody_up_in_backward() -> None:
    cross: Any = Queue()
    ours = {(lane, lane + 1): torch.ones(4).as_subclass(Waits) for lane in range(2)}
    into = torch.zeros(4).as_subclass(Waits)
    Waits.noted.clear()
    Reduction(cross, ours, into, [4], exact=False).start(4)
    assert Waits.noted == [False, False] and into.tolist() == [2.0] * 4
