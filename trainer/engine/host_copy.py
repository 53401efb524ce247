"""Copies of a worker's state in memory of the host that another process can open.

A buffer is a file without a name (memfd): who knows the process and the descriptor's number opens
it under /proc, and from then on it outlives this process. The kernel frees it with its last user,
so nothing is left behind, however processes end. It is made once and used again and again: a save
allocates nothing, and costs the copy alone.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from checkpointing import TensorSlice, plan_places
from trainer.engine.shared_copy import HEADER_BYTES, stamp
from trainer.streams import stream_for

_numbers = itertools.count(1)


class Share:
    """What one worker writes of every save, and where it lies in a buffer.

    Args:
        parts: slices, with the live tensors that are copied: views of the state.
        still: names of those that training does not change.
    """

    def __init__(
        self,
        parts: Sequence[tuple[TensorSlice, torch.Tensor]],
        still: frozenset[str] = frozenset(),
    ) -> None:
        self.still = still
        self.slices = tuple(part for part, _ in parts)
        self.tensors = [tensor for _, tensor in parts]
        self.places, self.size_bytes = plan_places(self.slices)


class Copy(Protocol):
    """A copy that is being made, beside what is computed from now on."""

    def before_change(self) -> None:
        """What comes after this may change what is copied."""

    def wait(self) -> None:
        """Returns once it is there, to be read."""

    def done(self) -> bool:
        """Whether it is there. Waits for nothing."""

    @property
    def held_s(self) -> float:
        """Seconds for which `before_change` has held up its caller."""


class HostBuffer:
    """Memory for a worker's share. All of it is touched, and pinned for `device`, when this
    returns.

    Args:
        size_bytes: room for one share.
        device: where copies come from.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self.number = 0
        """Of the copy that it holds, see `shared_copy.py`."""
        self.fd = os.memfd_create("elastictrainer-save")
        os.ftruncate(self.fd, HEADER_BYTES + size_bytes)
        self._memory = mmap.mmap(self.fd, HEADER_BYTES + size_bytes)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._bytes.zero_()  # the kernel gives the pages now and not in the first save
        self._device, self._pinned = device, device.type == "cuda"
        self._stream = stream_for("save", device) if self._pinned else None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="save copy")
        if self._pinned:
            _pin(self._bytes)
        self._slices: tuple[TensorSlice, ...] = ()  # what the views are of; no state is kept alive
        self._views: list[torch.Tensor] = []

    def copy(self, share: Share) -> Copy:
        """Begins to copy a share from where the state is: on a CPU a thread does, on CUDA a stream.

        Returns:
            What to wait for, before the state changes and before the copy is read.
        """
        self.number = next(_numbers)
        stamp(self._memory, self.number)
        if self._slices is not share.slices:
            self._slices, self._views = share.slices, self._lay_out(share)
        if self._stream is None:
            return _ByThread(self._copier.submit(_copy_all, self._views, share.tensors))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for view, tensor in zip(self._views, share.tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)  # its engine may be dropped meanwhile
        return _ByStream(self._stream.record_event())

    def _lay_out(self, share: Share) -> list[torch.Tensor]:
        room = self._bytes[HEADER_BYTES:]
        return [
            room[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(share.places, share.tensors, strict=True)
        ]

    def close(self) -> None:
        """Gives the memory back, once nothing is copied to it; who has opened it keeps it."""
        self._copier.shutdown()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._slices, self._views = (), []
        os.close(self.fd)


def _copy_all(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if views:  # a worker may have none of a small model
        torch._foreach_copy_(views, tensors)


class _ByThread:
    def __init__(self, done: Future[None]) -> None:
        self._done, self.held_s = done, 0.0

    def before_change(self) -> None:
        began_s = time.monotonic()
        self.wait()
        self.held_s += time.monotonic() - began_s

    def wait(self) -> None:
        self._done.result()

    def done(self) -> bool:
        return self._done.done()


class _ByStream:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done, self.held_s = done, 0.0

    def before_change(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()

    def done(self) -> bool:
        return self._done.query()


def _pin(memory: torch.Tensor) -> None:
    """Lets the device copy to `memory` by itself."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        raise MemoryError(
            f"{memory.nbytes / 1e6:.0f} MB could not be pinned (CUDA error {int(error)}); raise "
            f"the limit on locked memory (ulimit -l)"
        )
