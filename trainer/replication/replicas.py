"""What crosses replicas in a step: the reduction and the commit.

A collective here is started asynchronously and polled, because Gloo itself cannot end one whose
peer is frozen or cut off; on a fault signal the group, the work and its
buffers are abandoned instead. Nothing is asked of a device before that: on CUDA, where memory is
short, even an allocation may wait for a stream that waits for the lost peer. A failed or abandoned
collective raises `CrossGroupLost`, and the caller goes on with what its own replica still expects
of it (the loop enters the in-replica part of the commit with the failure noted), so a healthy
replica never blocks in itself.

A collective may fail on one member alone, whose peers then wait for it in the next one, while it
waits inside its replica for a worker that may wait so in another of these groups. So whoever meets
a failure that nobody has announced says so at once (`on_lost`), and the control plane calls all
away. Decision: docs/decisions/025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from trainer.backend.groups import Device, abandon, abort_groups, make_cross_groups
from trainer.backend.origin import lasting_device_error
from trainer.backend.polling import LEFT, poll_until
from trainer.backend.rendezvous import Rendezvous
from trainer.errors import CrossGroupLost, GroupError
from trainer.replication.lanes import blocks_of
from trainer.streams import stream_for
from trainer.unprofiled import unprofiled

EXCHANGE, GATHER = 0, -1
"""Channels. On Gloo each has a process group of its own, so collectives of different channels may
be issued in any order. On NCCL they share one."""

_SUCCESS = int(cast(Any, c10d).WorkResult.SUCCESS)
_FAILED = "NCCL has met an error in the group across replicas; c10d has logged it"


@dataclass
class Flight:
    """A collective that was started."""

    work: Any
    """c10d's handle."""
    buffers: tuple[torch.Tensor, ...]
    """What it reads and writes."""
    end: Any = None
    """On NCCL, once the host has asked for it: the mark that the device reaches when it is done."""
    result: Any = None
    """And c10d's word of how it went, which comes later than the mark, or with an error."""


class CrossGroup:
    """The workers with one (shard, tensor) in all replicas of a roster, for one generation.

    Args:
        rendezvous: where the group meets.
        prefix: unique to the generation and the (shard, tensor).
        lanes: for each replica, in rank order, the lanes dealt to it; after those, none for each
            that follows.
        total_lanes: lanes of the run.
        rank: position of this worker's replica.
        device: where the tensors are.
        leave_now: true once a fault has been announced; polled while waiting.
        on_lost: called once, with the reason, where the group has failed and no fault was
            announced. It may neither block nor raise.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        prefix: str,
        *,
        lanes: Sequence[tuple[int, ...]],
        total_lanes: int,
        rank: int,
        device: Device,
        leave_now: Callable[[], bool],
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.rank, self.size = rank, len(lanes)
        self.total_lanes, self.lanes = total_lanes, list(lanes)
        self.blocks = [blocks_of(held, total_lanes) for held in lanes]
        self._device = torch.device(device)
        self._leave_now, self._on_lost = leave_now, on_lost
        self._in_flight: dict[int, Flight] = {}
        self._groups: list[Any] = []
        self.free: list[torch.Tensor] = []
        """Memory of buckets, kept from step to step."""
        self._lost: str | None = None
        self._ended = True
        self._in_backward = self._device_failed = False
        self._timeout_s = rendezvous.timeout_s
        self._streams = torch.get_device_module(self._device)
        # That of each group before: on CUDA the allocator keeps what was freed for the stream that
        # it was taken on, and from another's nobody would get it any more.
        self.stream = stream_for("cross", self._device)
        self._ends = stream_for("ends of collectives", self._device, priority=-2)
        if self.size > 1:
            self._join(rendezvous, prefix, device)

    def _join(self, rendezvous: Rendezvous, prefix: str, device: Device) -> None:
        """Makes the group once everybody is there. A failure is noted and shows in the first
        collective."""
        try:
            self._groups = make_cross_groups(
                rendezvous,
                prefix,
                rank=self.rank,
                size=self.size,
                device=device,
                leave_now=self._leave_now,
            )
        except RuntimeError as error:
            self._lose(error)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduces `tensor` over the replicas, in place."""
        if self.size > 1:
            self._run(lambda group: group.allreduce([tensor]), tensor)
        return tensor

    def gather_numbers(self, number: int | None) -> list[int | None]:
        """One int64 of each replica, or None, by position, on all of them."""
        if self.size == 1:
            return [number]
        mine = torch.tensor([number is not None, number or 0], dtype=torch.int64)
        mine = mine.to(self._device)
        all_of_them = mine.new_empty(2 * self.size)
        self._run(lambda group: group._allgather_base(all_of_them, mine), all_of_them, mine)
        pairs = all_of_them.view(self.size, 2).tolist()
        return [value if there else None for there, value in pairs]

    def hear(self, tensor: torch.Tensor, position: int = 0) -> None:
        """Broadcasts `tensor` of the worker at `position`, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = position
        self._run(lambda group: group.broadcast([tensor], options), tensor)

    def start(
        self, issue: Callable[[Any], Any], *buffers: torch.Tensor, channel: int = EXCHANGE
    ) -> Flight:
        """Starts a collective.

        Args:
            issue: gets the process group and returns the work.
            buffers: what it reads and writes, kept alive until it is done.
            channel: collectives of one channel are issued in the same order on all ranks.

        Raises:
            CrossGroupLost: it could not be started, or an earlier one has failed.
        """
        if self._on_nccl:
            self.listen()  # what is begun on a group that was aborted would make another
        else:
            self.check()
        try:
            with nullcontext() if self._on_nccl else unprofiled():
                flight = Flight(issue(self._groups[channel]), buffers)
        except RuntimeError as error:
            raise self._lose(error) from error
        self._in_flight[id(flight.work)] = flight
        return flight

    def start_gathering(self, whole: torch.Tensor) -> list[Flight]:
        """Starts to gather the equal pieces of `whole`, of which each replica has its own, on the
        channel GATHER.

        Gloo's all-gather takes fresh memory for all of `whole` and copies it from there; its
        broadcasts, one from each replica, move as many bytes and copy nothing.
        """
        pieces = whole.split(whole.numel() // self.size)
        if whole.is_cuda:
            own = pieces[self.rank]
            gather = methodcaller("_allgather_base", whole, own)
            return [self.start(gather, whole, channel=GATHER)]
        return [
            self.start(methodcaller("broadcast", piece, root), piece, channel=GATHER)
            for root, piece in enumerate(pieces)
        ]

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Within, the end of a group that is lost is asked for, but not waited for: the replica
        goes on, and what it begins the end may wait for. The next `check` leaves the group."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def check(self) -> None:
        """Raises CrossGroupLost where a collective has failed already."""
        if self._lost is not None:
            if not self._in_backward:
                self.close()
            raise CrossGroupLost(self._lost)

    def listen(self, flight: Flight | None = None) -> None:
        """Raises CrossGroupLost where this worker is called away, or a collective has failed: that
        one, or any that is known of."""
        self.check()
        if self._leave_now():
            raise self._lose(GroupError(LEFT))
        if self._has_failed(flight):
            raise self._lose(GroupError(_FAILED))

    def on_stream(self) -> AbstractContextManager[Any]:
        """On CUDA, a stream for what must not hold up the current one. It comes after the marks
        that it waits for, and after nothing else."""
        return self._streams.stream(self.stream)

    def mark(self) -> Any:
        """On CUDA, the end of what is queued on the current stream now."""
        return self._streams.current_stream().record_event()

    def wait_for(self, mark: Any) -> None:
        """What is queued in `stream` from now on comes after all that was there at the mark."""
        self.stream.wait_event(mark)

    def join_stream(self) -> None:
        """What is queued on the current stream from now on comes after all that is in `stream`."""
        self._streams.current_stream().wait_stream(self.stream)

    def has_ended(self, flight: Flight) -> bool:
        """Whether nobody needs to wait for a collective any more: it has come to its end, or never
        will. On NCCL `Work.is_completed` is not asked, for which both are one: it waits for an
        abort that has begun, and holds the interpreter meanwhile, so that no other could begin."""
        if not self._on_nccl:
            return bool(flight.work.is_completed())
        if self._leave_now():
            return True
        if flight.end is None:
            self._mark_end(flight)
        return self._has_failed(flight) or bool(flight.end.query())

    def _mark_end(self, flight: Flight) -> None:
        flight.result = flight.work.get_future_result()
        with self._streams.stream(self._ends):
            flight.work.block_current_stream()
            flight.end = self.mark()

    def _has_failed(self, flight: Flight | None = None) -> bool:
        """Whether c10d's watchdog has met an error of NCCL's, for which it looks ten times a
        second: in one collective, or in any. It does not count in the group what comes between two
        of its looks at one. On Gloo `follow` finds out."""
        if not self._on_nccl:
            return False
        if flight is not None and flight.result.done():
            return bool(flight.result.value() != _SUCCESS)
        return any(each.get_error() != c10d.ErrorType.SUCCESS for each in self._groups)

    @property
    def _on_nccl(self) -> bool:
        return self._device.type == "cuda"

    def may_follow(self, flight: Flight) -> bool:
        """Whether `follow` will not make the host wait. On NCCL it never does."""
        return self._on_nccl or bool(flight.work.is_completed())

    def poll(self, flight: Flight) -> None:
        """Waits for a collective on the host, watching for a fault.

        Raises:
            CrossGroupLost: a fault was announced, or a peer did not come.
        """
        try:
            poll_until(lambda: self.has_ended(flight), self._leave_now, self._timeout_s)
        except RuntimeError as error:
            raise self._lose(error) from error
        if self._on_nccl:
            # One that a call has aborted ends like another, with anything in it.
            self.listen(flight)

    def follow(self, flight: Flight) -> None:
        """Orders what this worker does next after a collective: on NCCL the current stream waits,
        and whether it came to its end shows when the host polls, it or a later one.

        Raises:
            CrossGroupLost: the collective failed.
        """
        self.check()
        try:
            # On NCCL `wait` would do no more but, after an error, abort the group first, which
            # takes this thread half a second.
            flight.work.block_current_stream() if self._on_nccl else flight.work.wait()
        except RuntimeError as error:
            raise self._lose(error) from error
        del self._in_flight[id(flight.work)]

    def writes_on(self) -> bool:
        """Of a lost group: whether a collective that was abandoned may still write to its
        buffers."""
        return not self._ended

    def close(self) -> None:
        """Leaves the group without waiting for anybody, but for what was queued on the device. On
        one that has failed aborts fail, too, or do not end; the process does."""
        if self._groups and not self._device_failed:
            for group in self._groups:
                self._ended &= abandon(group, list(self._in_flight.values()))
            try:
                self._streams.synchronize()  # from here on others may have the buffers' memory
            except RuntimeError:
                if lasting_device_error() is None:
                    raise
        self._groups, self._in_flight = [], {}

    def _run(self, issue: Callable[[Any], Any], *buffers: torch.Tensor) -> None:
        flight = self.start(issue, *buffers)
        self.poll(flight)
        self.follow(flight)

    def _lose(self, error: RuntimeError) -> CrossGroupLost:
        """A failed group is told of and left. An error of this worker's device is raised as it is:
        it is nobody else's."""
        if isinstance(error, torch.AcceleratorError):
            self._device_failed = True
            raise error
        self._lost = str(error)
        if not self._leave_now():
            self._on_lost(self._lost)
        if self._in_backward:
            abort_groups(replica=None)
        else:
            self.close()
        return CrossGroupLost(self._lost)
