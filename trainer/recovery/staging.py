"""Copies from a device to memory of the host that is new each time, through a few pinned blocks.

A device writes fast to pinned memory alone, and what torch pins it keeps for ever. Memory that is
new costs its first touch, 2 to 3 GB/s a thread. So several threads copy, each through one pinned
block of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from trainer.recovery.state_blocks import BLOCK_BYTES, Block, cut
from trainer.streams import stream_for


class Stage:
    """One thread's: on CUDA a pinned block, and a stream that runs beside what is computed.

    Args:
        device: where copies come from.
        number: of those that copy beside each other.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._device = device
        self._stream = stream_for(f"stage {number}", device) if device.type == "cuda" else None
        self._pinned: torch.Tensor | None = None

    def follow(self) -> None:
        """What is copied from now on is copied after all that the calling thread has queued."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, block: Block, into: torch.Tensor) -> None:
        """Copies a block, and returns once it is there. `into` has its size, on the host."""
        sizes = [view.numel() for view in block.views]
        with torch.cuda.stream(self._stream):  # nothing on a CPU
            there = into if self._stream is None else self._pinned_block()[: block.size_bytes]
            for place, view in zip(there.split(sizes), block.views, strict=True):
                place.copy_(view, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
            np.copyto(into.numpy(), there.numpy())  # by this thread alone, without Python's lock

    def _pinned_block(self) -> torch.Tensor:
        if self._pinned is None:
            self._pinned = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._pinned


def copy_to_host(flat: torch.Tensor, stages: Sequence[Stage]) -> torch.Tensor:
    """A copy of a flat tensor on the host, made after all that this thread has queued, by as many
    threads as there are stages. Returns once it is there."""
    copied = torch.empty(flat.shape, dtype=flat.dtype)
    room, blocks = copied.view(torch.uint8), cut([flat.view(torch.uint8)])

    def copy(number: int) -> None:
        for block in blocks[number :: len(stages)]:
            into = room[block.position : block.position + block.size_bytes]
            stages[number].copy(block, into)

    for stage in stages:
        stage.follow()
    with ThreadPoolExecutor(len(stages)) as pool:
        list(pool.map(copy, range(len(stages))))
    return copied
