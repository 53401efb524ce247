"""A worker's state as one string of bytes, in blocks: the same ones in every replica."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from trainer.engine.engine import Engine

BLOCK_BYTES = 4 << 20
"""Large enough for the network's full speed; so small that each stream of a heal can have a pinned
one on either side, and is left soon."""


class Block(NamedTuple):
    """A range of the state."""

    position: int
    """Its first byte."""
    views: list[torch.Tensor]
    """The parts of the tensors that it is, as bytes, in order."""

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return sum(view.numel() for view in self.views)


def flat_state(engine: Engine) -> list[torch.Tensor]:
    """The state as flat views of bytes, in the order that every replica has."""
    return [tensor.view(-1).view(torch.uint8) for tensor in engine.state.tensors().values()]


def cut(state: Iterable[torch.Tensor]) -> list[Block]:
    """Flat views of bytes, in blocks of BLOCK_BYTES, of which the last may be shorter."""
    blocks: list[Block] = []
    room = 0
    for part in state:
        while part.numel():
            if not room:
                blocks.append(Block(len(blocks) * BLOCK_BYTES, []))
                room = BLOCK_BYTES
            view, part = part[:room], part[room:]
            blocks[-1].views.append(view)
            room -= view.numel()
    return blocks
