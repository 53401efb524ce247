"""What a heal is sent over: a group of one source and its newcomers, left at any time."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from trainer.backend.groups import Device, abandon, make_raw_groups
from trainer.backend.polling import poll_until
from trainer.backend.rendezvous import Rendezvous


class HealChannel:
    """The group of one source (rank 0) and its newcomers. Used by one thread; `stop` by any.

    Args:
        rendezvous: where they meet.
        prefix: unique to the generation, the (shard, tensor) and the source.
        rank: 0 for the source.
        size: the source and its newcomers.
        device: where the chunks are.
    """

    def __init__(
        self, rendezvous: Rendezvous, prefix: str, *, rank: int, size: int, device: Device
    ) -> None:
        self._rendezvous, self._prefix = rendezvous, prefix
        self._rank, self._size, self._device = rank, size, device
        self._group: Any = None
        self._in_flight: list[Any] = []
        self._stopped = threading.Event()

    def open(self) -> None:
        """Makes the group once all are there. Raises RuntimeError where one does not come."""
        (self._group,) = make_raw_groups(
            self._rendezvous,
            [self._prefix],
            rank=self._rank,
            size=self._size,
            device=self._device,
            leave_now=self._stopped.is_set,
        )

    def send(self, tensor: torch.Tensor) -> None:
        """Hands rank 0's `tensor` to all, in place. Raises RuntimeError where a peer is lost."""
        work = self._group.broadcast([tensor], dist.BroadcastOptions())
        try:
            poll_until(work.is_completed, self._stopped.is_set, self._rendezvous.timeout_s)
        except RuntimeError:
            self._in_flight.append((work, tensor))
            raise
        work.wait()

    def stop(self) -> None:
        """The thread that uses the channel is to leave it."""
        self._stopped.set()

    def close(self) -> None:
        """Leaves the group without waiting for anybody."""
        if self._group is not None:
            abandon(self._group, self._in_flight)
        self._group = None
