"""Memory of the host for what leaves the device for a while, and the copies there and back.

Copies run beside the computation: on CUDA on two streams, one for each way, from and to pinned
memory; on a CPU on a thread. On a CPU nothing is saved by it: what leaves "the device" lies in the
same memory. It is the same order of copies and waits, with real copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from trainer.streams import stream_for


class Flight(Protocol):
    """A copy under way, which keeps both its ends alive."""

    def wait(self) -> None:
        """Has what is computed from now on come after the copy, and lets go of its ends. On CUDA
        the host does not wait."""

    def drop(self) -> None:
        """The same for a copy that nobody needs any more."""


class HostMemory(ABC):
    """Blocks of host memory, used again and again, and copies to and from them.

    It outlives the model: pinning memory is slow, and a regroup finds it as it was. Sizes are
    rounded up to powers of two, as torch rounds pinned memory; so there are few kinds of block,
    whatever shapes come.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self.held_bytes = 0
        """In all blocks, in use or not."""

    @property
    def free_bytes(self) -> int:
        """In blocks that are not in use."""
        return sum(size * len(blocks) for size, blocks in self._free.items())

    def take(self, size: int) -> torch.Tensor:
        """A block of bytes, of `size` or more.

        Appending and popping are atomic: `give_back` may run at any moment, where Python collects.
        """
        rounded = 1 << (size - 1).bit_length()
        try:
            return self._free.setdefault(rounded, []).pop()
        except IndexError:
            self.held_bytes += rounded
            return self._new(rounded)

    def give_back(self, block: torch.Tensor) -> None:
        """Ends the use of a block. Its copies were waited for, or dropped."""
        self._free[block.numel()].append(block)

    def store(self, block: torch.Tensor, values: torch.Tensor) -> Flight:
        """Begins a copy to the host, once all is computed that was begun until now.

        Args:
            block: it goes to the block's first bytes.
            values: contiguous, on the device.
        """
        return self._copy(block, values, back=False)

    def load(self, values: torch.Tensor, block: torch.Tensor) -> Flight:
        """Begins the copy back, once all is computed that was begun until now."""
        return self._copy(block, values, back=True)

    @abstractmethod
    def _new(self, size: int) -> torch.Tensor:
        """A new block of so many bytes."""

    @abstractmethod
    def _copy(self, block: torch.Tensor, values: torch.Tensor, *, back: bool) -> Flight:
        """Begins a copy between a block's first bytes and values on the device."""


def _ends(
    block: torch.Tensor, values: torch.Tensor, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where to, and where from."""
    there = block[: values.nbytes].view(values.dtype)
    return (values, there) if back else (there, values)


def host_memory(device: torch.device) -> HostMemory:
    """The kind of it that goes with a device."""
    return StreamMemory(device) if device.type == "cuda" else ThreadMemory()


class ThreadMemory(HostMemory):
    """For a CPU: a thread copies, in the order that it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1, "offload")

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def _copy(self, block: torch.Tensor, values: torch.Tensor, *, back: bool) -> Flight:
        into, source = _ends(block, values, back)
        return _ThreadFlight(self._thread.submit(into.copy_, source))


class _ThreadFlight:
    def __init__(self, copied: Future[Any]) -> None:
        self._copied: Future[Any] | None = copied

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def drop(self) -> None:
        # Nobody waits: Python may collect on the very thread that copies. Whoever has the block
        # next has the same thread copy after this.
        if self._copied is not None:
            self._copied.cancel()
        self._copied = None


class StreamMemory(HostMemory):
    """For CUDA: pinned memory, and a stream for each way."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._out = stream_for("offload out", device)
        self._back = stream_for("offload back", device)

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copy(self, block: torch.Tensor, values: torch.Tensor, *, back: bool) -> Flight:
        into, source = _ends(block, values, back)
        stream, computing = self._back if back else self._out, torch.cuda.current_stream()
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        return _StreamFlight(stream.record_event(), computing, (into, source))


class _StreamFlight:
    """The ends are the computing stream's memory: they are let go of once that stream is behind
    the copy, so nothing waits for the allocator to notice."""

    def __init__(self, copied: Any, computing: Any, ends: tuple[torch.Tensor, ...]) -> None:
        self._copied, self._computing, self._ends = copied, computing, ends

    def wait(self) -> None:
        if self._ends:
            self._computing.wait_event(self._copied)
            self._ends = ()

    drop = wait
