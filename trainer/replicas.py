"""What crosses replicas in a step: the reduction and the commit.

A collective here is started asynchronously and polled, because a Gloo collective whose peer is
frozen or cut off cannot be woken from outside; on a fault signal the group, the work and its
buffers are abandoned instead. A failed or abandoned collective raises `CrossGroupLost`, and the
caller goes on with what its own replica still expects of it (the loop enters the in-replica part of
the commit with the failure noted), so a healthy replica never blocks in itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.backend.groups import (
    Device,
    Rendezvous,
    abandon,
    gather,
    make_cross_group,
    poll_until,
)
from trainer.errors import CrossGroupLost
from trainer.lanes import Node, blocks_of, sum_tree


class CrossGroup:
    """The workers with one (shard, tensor) in all replicas of a roster, for one generation.

    Args:
        rendezvous: where the group meets.
        prefix: unique to the generation and the (shard, tensor).
        lanes: for each replica, in rank order, the lanes dealt to it.
        total_lanes: lanes of the run.
        rank: position of this worker's replica.
        device: where the tensors are.
        leave_now: true once a fault has been announced; polled while waiting.
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
    ) -> None:
        self.rank, self.size = rank, len(lanes)
        self.total_lanes = total_lanes
        self.blocks = [blocks_of(held, total_lanes) for held in lanes]
        self._device = torch.device(device)
        self._leave_now = leave_now
        self._kept: list[Any] = []
        self._group: Any = None
        self._lost: str | None = None
        self._timeout_s = rendezvous.timeout_s
        if self.size > 1:
            self._join(rendezvous, prefix, device)

    def _join(self, rendezvous: Rendezvous, prefix: str, device: Device) -> None:
        """Makes the group once everybody is there. A failure is noted and shows in the first
        collective."""
        try:
            gather(rendezvous, prefix, self.rank, self.size, self._leave_now)
            self._group = make_cross_group(
                rendezvous, prefix, rank=self.rank, size=self.size, device=device
            )
        except RuntimeError as error:
            self._lost = str(error)

    def reduce_exact(self, mine: Mapping[Node, torch.Tensor], into: torch.Tensor) -> None:
        """Sums the gradients of all lanes in the fixed tree; every replica gets the same bits.

        Each replica owns one piece of the gradient: it receives all contributions to it
        (all-to-all), adds them in tree order, and the pieces are gathered again. The traffic is
        that of a ring all-reduce.

        Args:
            mine: this replica's subtrees -> flat gradients. They stay as they are.
            into: gets the sum; as long as each of `mine`, padding included.

        Shapes: all flat; the padding makes the length at least that of `size` equal pieces.
        """
        if self.size == 1:
            into.copy_(sum_tree(mine, self.total_lanes, torch.add))
            return
        piece = into.numel() // self.size
        held = [mine[node] for node in self.blocks[self.rank]]
        sends = [len(held) * piece] * self.size
        receives = [len(blocks) * piece for blocks in self.blocks]
        outgoing = self._pack(held, piece)
        incoming = outgoing.new_empty(sum(receives))
        self._run(
            lambda group: group.alltoall_base(incoming, outgoing, receives, sends),
            incoming,
            outgoing,
        )
        nodes = [node for blocks in self.blocks for node in blocks]
        parts = dict(zip(nodes, incoming.split(piece), strict=True))
        own = sum_tree(parts, self.total_lanes, torch.add)
        whole = into[: self.size * piece]
        self._run(lambda group: group._allgather_base(whole, own), whole, own)

    def reduce_fast(self, mine: Mapping[Node, torch.Tensor], into: torch.Tensor) -> None:
        """Plain all-reduce: the sum's bits depend on how many replicas there are."""
        into.zero_()
        for block in mine.values():
            into.add_(block)
        self.sum(into)

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

    def close(self) -> None:
        """Leaves the group without waiting for anybody."""
        if self._group is not None:
            abandon(self._group, self._kept)
        self._group, self._kept = None, []

    def _pack(self, held: Sequence[torch.Tensor], piece: int) -> torch.Tensor:
        whole = self.size * piece
        if len(held) == 1:
            return held[0][:whole]
        if not held:
            return torch.empty(0, device=self._device)
        return torch.stack(
            [block[:whole].view(self.size, piece) for block in held], dim=1
        ).flatten()

    def _run(self, start: Callable[[Any], Any], *buffers: torch.Tensor) -> None:
        """Starts a collective and waits for it, watching for a fault."""
        if self._lost is not None:
            raise CrossGroupLost(self._lost)
        try:
            work = start(self._group)
            try:
                poll_until(work.is_completed, self._leave_now, self._timeout_s)
            except RuntimeError:
                self._kept.append((work, buffers))
                raise
            work.wait()
            if work.exception() is not None:  # NCCL's wait does not raise it
                raise RuntimeError(str(work.exception()))
        except RuntimeError as error:
            self._lost = str(error)
            raise CrossGroupLost(self._lost) from error
