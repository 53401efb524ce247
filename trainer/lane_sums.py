"""Gradients of the lanes that one worker has computed in the current step.

They outlive an interrupted step: after a regroup a replica computes only the lanes it does not have
yet, so that a fault costs the lanes of the lost replica and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.commit import LaneStats
from trainer.lanes import Node, blocks_of, split


class LaneSums:
    """Sums of whole subtrees of lanes, added up in tree order as lanes come in.

    Args:
        total_lanes: lanes of the run.
        length: numbers in a gradient buffer, padding included.
        device: where the buffers live.
    """

    def __init__(self, total_lanes: int, length: int, device: torch.device) -> None:
        self._total, self._length, self._device = total_lanes, length, device
        self._free: list[torch.Tensor] = []
        self.blocks: dict[Node, torch.Tensor] = {}
        self.stats: dict[int, LaneStats] = {}
        self.step = -1

    def begin(self, step: int, lanes: Sequence[int]) -> list[int]:
        """Starts or continues `step` with the lanes dealt to this replica.

        Returns:
            The lanes still to be computed. Sums of another step, or with lanes that are no longer
            this replica's, are dropped.
        """
        if step != self.step or not set(self.stats) <= set(lanes):
            self.clear()
            self.step = step
        return [lane for lane in lanes if lane not in self.stats]

    def buffer(self) -> torch.Tensor:
        """A flat float32 buffer to put a lane's gradient in; its padding is zero."""
        if self._free:
            return self._free.pop()
        return torch.zeros(self._length, device=self._device)

    def add(self, lane: int, gradient: torch.Tensor, stats: LaneStats) -> None:
        """Takes a lane's gradient (a `buffer()`), and adds up every subtree that is now whole."""
        self.stats[lane] = stats
        self.blocks[(lane, lane + 1)] = gradient
        for node in blocks_of(self.stats, self._total):
            self._merge(node)

    def _merge(self, node: Node) -> torch.Tensor:
        if node in self.blocks:
            return self.blocks[node]
        left, right = (self._merge(child) for child in split(node))
        for child in split(node):
            del self.blocks[child]
        self._free.append(right)
        self.blocks[node] = left.add_(right)
        return left

    def clear(self) -> None:
        """Forgets everything; the buffers are kept for the next step."""
        self._free.extend(self.blocks.values())
        self.blocks.clear()
        self.stats.clear()
