"""Copies to the host: all of it, at the place where it belongs, by every thread."""

from __future__ import annotations

import threading

import pytest
import torch

from trainer.recovery import staging
from trainer.recovery.staging import Stage, copy_to_host
from trainer.recovery.state_blocks import BLOCK_BYTES, Block
from trainer.streams import stream_for

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [0, 1, 1000, BLOCK_BYTES // 4, 9 * BLOCK_BYTES // 4 + 3])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_copy_is_whole(count: int, threads: int) -> None:
    flat = torch.arange(count, dtype=torch.float32)
    copied = copy_to_host(flat, [Stage(CPU, number) for number in range(threads)])
    assert copied.dtype == flat.dtype and torch.equal(copied, flat)
    assert count == 0 or copied.data_ptr() != flat.data_ptr()


def test_heals_use_the_same_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32 for all that a process does, and never takes one back."""
    made = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append(device))
    stream_for.cache_clear()
    for _ in range(10):
        for number in range(4):
            Stage(torch.device("cuda", 0), number)
    stream_for.cache_clear()
    assert len(made) == 4


def test_its_blocks_are_copied_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, together = Stage.copy, threading.Barrier(3, timeout=30.0)

    def met(self: Stage, block: Block, into: torch.Tensor) -> None:
        together.wait()  # broken, and an error, where one thread copies block after block
        copy(self, block, into)

    monkeypatch.setattr(staging.Stage, "copy", met)
    flat = torch.arange(6 * BLOCK_BYTES, dtype=torch.uint8)
    assert torch.equal(copy_to_host(flat, [Stage(CPU, number) for number in range(3)]), flat)
