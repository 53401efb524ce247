"""The sum of one step's gradients over the lanes of all replicas, started bucket by bucket.

In the exact reduction each replica owns an equal piece of every bucket. It receives all lanes'
contributions to its piece (an all-to-all), adds them in the one fixed tree, and the pieces are
gathered again:

    start(stop)     in backward: the first `stop` numbers are there
        _begin          all-to-all of each bucket that is whole now
        _advance        for each that has arrived: sum of the own piece, gathering
    finish()        after backward: the remaining buckets, then waits for all of them

What is sent may be bfloat16. Then each lane's gradient and each sum in the tree are rounded to it,
wherever they are made, so that the bits do not depend on that either.

Every replica issues the same collectives in the same order whenever its own gradients come, because
a group matches collectives by their order. On Gloo the gatherings have a group of their own, since
how they fall among the all-to-alls depends on timing. On CUDA each follows the all-to-all of its
bucket, on a stream of their own, and nothing on the host waits before `finish`; where many are
queued, more are begun when some have ended, so that the queue of launches does not fill up behind
one that never ends. Decisions: docs/decisions/008, 045.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch

from trainer.errors import CrossGroupLost
from trainer.replication.buckets import plan_bounds
from trainer.replication.lanes import Node, split, sum_tree
from trainer.replication.replicas import CrossGroup, Flight

ARRIVING = 2
"""Buckets that may be under way at once where what arrives needs memory of its own. On CUDA there
is one."""

_QUEUED = 16
"""Buckets whose kernels are queued at once, at most."""

_LAUNCHES = 768
"""And launches of these. A launch queue holds 1,024."""

_OF_A_BUCKET = 10
"""Launches, some more or less, and an addition for each subtree that arrives."""


class Reduction:
    """One step's reduction on one worker; the same worker of every replica makes one.

    A replica may have no lanes: it takes part in the sums and gets the result.

    Args:
        cross: the group across replicas.
        mine: this replica's subtrees -> flat gradients, on the device or on the host. Complete
            once the last lane is open, and read only, but for one that is `into`.
        into: gets the sum, bucket by bucket, each once it has been read. Its padding makes it long
            enough for equal pieces.
        ends: where the buckets end.
        exact: sums in the fixed tree; else a plain all-reduce, whose bits depend on how many
            replicas there are.
        dtype: of what is sent, and of each sum. `mine` has been rounded to it.
    """

    def __init__(
        self,
        cross: CrossGroup,
        mine: Mapping[Node, torch.Tensor],
        into: torch.Tensor,
        ends: Sequence[int],
        *,
        exact: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._cross, self._mine, self._into, self._exact = cross, mine, into, exact
        self._dtype = dtype
        self._ends = ends
        self._buckets = list(pairwise(plan_bounds(ends, cross.size)))
        launches = _OF_A_BUCKET + sum(map(len, cross.blocks))
        self._queued = min(_QUEUED, max(1, _LAUNCHES // launches))
        self._begun = 0
        self._marks: deque[tuple[int, Any]] = deque()
        """How many numbers were there, of all of `mine`, at which mark. Rising."""
        self._arriving: deque[tuple[Flight, slice, torch.Tensor]] = deque()
        self._last: list[tuple[list[Flight], slice]] = []
        self._ended = 0
        """Of `_last`, from its beginning."""
        self._free = [] if into.is_cuda else cross.free
        """Memory of buckets that have arrived and been added up. CUDA's allocator keeps its own;
        on a CPU the pages would be new in each step."""
        self.wrote = False
        """Something has been written to `into`, or may be."""

    def start(self, stop: int) -> None:
        """Starts the buckets within the first `stop` numbers, which are in all of `mine`.

        Called within backward, so it never raises for a lost group and never waits: `finish` does.
        """
        self._marks.append((stop, self._cross.mark()))
        with suppress(CrossGroupLost), self._cross.in_backward(), self._cross.on_stream():
            self._cross.check()  # after a loss no memory is taken for what will not begin
            self._begin(stop)
            self._advance()

    def finish(self) -> None:
        """Starts what has not been started yet, and waits until the sum is in `into`.

        Raises:
            CrossGroupLost: another replica is gone. What is in `into` is of no use.
        """
        self._cross.check()  # what `start` passed over in silence
        self._marks.append((self._ends[-1], self._cross.mark()))
        with self._cross.on_stream():
            self._begin(self._ends[-1])
            self._advance()
            while self._begun < len(self._ends) or self._arriving:
                oldest = self._arriving[0] if self._arriving else self._last[self._ended][0]
                self._cross.poll(oldest[0])
                self._advance()
                self._begin(self._ends[-1])
            for flights, bucket in self._last:
                for flight in flights:
                    self._cross.poll(flight)
                    self._cross.follow(flight)
                self._widen(bucket)
        self._cross.join_stream()

    @property
    def _needs_memory(self) -> bool:
        """Whether a bucket under way has no place in the result: what arrives is more, or what is
        sent is there or a copy."""
        cross = self._cross
        held = [self._mine[node] for node in cross.blocks[cross.rank]]
        sent_from_there = len(held) == 1 and held[0] is self._into
        more = sum(map(len, cross.blocks)) > cross.size
        return sent_from_there or more or self._dtype != torch.float32

    def _place(self, bucket: slice) -> torch.Tensor:
        """As many numbers of what is sent as the bucket has, at the beginning of its memory."""
        whole = self._into[bucket]
        return whole.view(self._dtype)[: whole.numel()]

    def _widen(self, bucket: slice) -> None:
        """The sum in float32, in the place of what was gathered."""
        if self._dtype != torch.float32:
            self._into[bucket].copy_(self._place(bucket).clone())

    def _begin(self, stop: int) -> None:
        while (
            self._begun < len(self._ends)
            and self._ends[self._begun] <= stop
            and not self._is_full()
        ):
            bucket = slice(*self._buckets[self._begun])
            self._come_after(self._ends[self._begun])
            self._begun += 1
            if bucket.start == bucket.stop:
                continue
            if self._exact and self._cross.size > 1:
                self._exchange(bucket)
                self._advance()  # on CUDA at once: the order may not depend on who calls `start`
            else:
                self._add_up(bucket)

    def _come_after(self, end: int) -> None:
        """What follows on the stream comes after the first `end` numbers."""
        while self._marks[0][0] < end:
            self._cross.wait_for(self._marks.popleft()[1])
        self._cross.wait_for(self._marks[0][1])

    def _is_full(self) -> bool:
        """Whether enough is under way: of what needs memory, or of what is queued on a device."""
        if self._needs_memory and len(self._arriving) == ARRIVING:
            return True
        if not self._into.is_cuda or not self._last:
            return False
        self._cross.listen()
        while self._ended < len(self._last) and self._have_ended(self._last[self._ended][0]):
            self._ended += 1
        return len(self._last) - self._ended >= self._queued

    def _have_ended(self, flights: Sequence[Flight]) -> bool:
        return all(map(self._cross.has_ended, flights))

    def _add_up(self, bucket: slice) -> None:
        """The plain all-reduce; and where one replica has all the lanes, their sum, which may be
        where it is to go already."""
        self.wrote, whole = True, self._into[bucket]
        others = [block[bucket] for block in self._mine.values() if block is not self._into]
        if len(others) == len(self._mine):
            whole.copy_(others.pop(0), non_blocking=True) if others else whole.zero_()
        for block in others:  # on the host they are pinned, and nobody waits in backward
            whole.add_(block.to(whole.device, non_blocking=True))
        if self._cross.size > 1:
            place = self._place(bucket)
            if self._dtype != torch.float32:
                place.copy_(whole.to(self._dtype))
            flight = self._cross.start(lambda group: group.allreduce([place]), place)
            self._last.append(([flight], bucket))

    def _exchange(self, bucket: slice) -> None:
        """Starts the all-to-all of a bucket. What arrives lies in the result's place, where that
        is free."""
        cross, place = self._cross, self._place(bucket)
        piece = place.numel() // cross.size
        blocks = [self._mine[node] for node in cross.blocks[cross.rank]]
        held = [b[bucket].to(place.device, self._dtype, non_blocking=True) for b in blocks]
        outgoing = pack(held, cross.size, place)
        sends = [len(held) * piece] * cross.size
        receives = [len(blocks) * piece for blocks in cross.blocks]
        count = sum(receives)
        if self._needs_memory:
            memory = self._find_memory(count, place)
        else:
            self.wrote, memory = True, place
        incoming = memory[:count]
        flight = cross.start(
            lambda group: group.alltoall_base(incoming, outgoing, receives, sends),
            incoming,
            outgoing,
        )
        self._arriving.append((flight, bucket, memory))

    def _find_memory(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """For `count` numbers that arrive, or more."""
        freed = self._free.pop() if self._free else like.new_empty(0)
        return freed if len(freed) >= count else like.new_empty(count)

    def _advance(self) -> None:
        """Sums and gathers what has arrived, in order."""
        while self._arriving and self._cross.may_follow(self._arriving[0][0]):
            flight, bucket, memory = self._arriving.popleft()
            self._cross.follow(flight)
            self._gather(bucket, memory)

    def _gather(self, bucket: slice, memory: torch.Tensor) -> None:
        """Sums the own piece and starts the gathering of all pieces."""
        self.wrote = True
        cross, place = self._cross, self._place(bucket)
        piece = place.numel() // cross.size
        nodes = [node for blocks in cross.blocks for node in blocks]
        own = place[cross.rank * piece :][:piece]
        incoming = memory[: piece * len(nodes)].split(piece)
        sum_into(own, dict(zip(nodes, incoming, strict=True)), cross.total_lanes)
        if self._needs_memory:
            self._free.append(memory)
        self._last.append((cross.start_gathering(place), bucket))


def sum_into(own: torch.Tensor, parts: Mapping[Node, torch.Tensor], lanes: int) -> None:
    """Adds up `parts` in the tree. They are overwritten, and `own` may be one of them: it is
    written by the last addition, which needs no other."""
    root = (0, lanes)
    if root in parts:
        own.copy_(parts[root])
        return
    left, right = (sum_tree(parts, child, torch.Tensor.add_) for child in split(root))
    torch.add(left, right, out=own)


def pack(held: Sequence[torch.Tensor], pieces: int, like: torch.Tensor) -> torch.Tensor:
    """The first piece of each of `held`, then the second of each, ...; a view where one is held."""
    if len(held) == 1:
        return held[0]
    if not held:
        return like.new_empty(0)
    return torch.stack([block.view(pieces, -1) for block in held], dim=1).flatten()
