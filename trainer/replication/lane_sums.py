"""Gradients of the lanes that one worker has computed in the current step.

They outlive an interrupted step: after a regroup a replica computes only the lanes it does not have
yet, so that a fault costs the lanes of the lost replica and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.replication.lanes import Node, blocks_of, split
from trainer.replication.step_commit import LaneStats


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
        self._home: torch.Tensor | None = None
        self.blocks: dict[Node, torch.Tensor] = {}
        self.stats: dict[int, LaneStats] = {}
        self.losses: dict[int, torch.Tensor] = {}
        """Lane -> the sum of its losses, a float64 where it was computed."""
        self._additions: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._settled = 0
        self.step = -1

    def begin(self, step: int, lanes: Sequence[int], home: torch.Tensor | None = None) -> list[int]:
        """Starts or continues `step` with the lanes dealt to this replica.

        Args:
            step: the current step.
            lanes: this replica's.
            home: where the sum of all lanes goes, of a replica that has them all: the first lane,
                onto which the others are added, has its place there.

        Returns:
            The lanes still to be computed. Sums of another step, or with lanes that are no longer
            this replica's, are dropped.
        """
        if step != self.step or not set(self.stats) <= set(lanes):
            self.clear()
            self.step = step
        if home is None:
            self._leave_home()
        self._home = home
        return [lane for lane in lanes if lane not in self.stats]

    def open(self, lane: int) -> torch.Tensor:
        """Gives `lane` its place in the tree, and a flat float32 buffer to put its gradient in.

        `settle` does the additions as the gradient comes in, and `close` ends the lane.
        """
        if lane == 0 and self._home is not None:
            gradient = self._home
        else:
            gradient = self._free.pop() if self._free else self._new()
        self.blocks[(lane, lane + 1)] = gradient
        self._additions, self._settled = [], 0
        held = {lane for node in self.blocks for lane in range(*node)}
        for node in blocks_of(held, self._total):
            self._merge(node)
        return gradient

    def _new(self) -> torch.Tensor:
        return torch.zeros(self._length, device=self._device)

    def _leave_home(self) -> None:
        """Sums that go on in a step with other replicas need a place that these do not write to."""
        for node, block in self.blocks.items():
            if block is self._home:
                self.blocks[node] = block.clone()

    def _merge(self, node: Node) -> torch.Tensor:
        """Puts the sum of a whole subtree where its left part is."""
        if node in self.blocks:
            return self.blocks[node]
        left, right = (self._merge(child) for child in split(node))
        for child in split(node):
            del self.blocks[child]
        self._additions.append((left, right))
        self._free.append(right)
        self.blocks[node] = left
        return left

    def settle(self, stop: int) -> None:
        """Adds up every subtree that the open lane makes whole, in its first `stop` numbers: they
        are in its buffer."""
        for left, right in self._additions:
            left[self._settled : stop].add_(right[self._settled : stop])
        self._settled = stop

    def close(self, lane: int, stats: LaneStats, loss: torch.Tensor) -> None:
        """The lane's whole gradient has been settled; its losses add up to `loss`."""
        self.stats[lane], self.losses[lane] = stats, loss

    def clear(self) -> None:
        """Forgets everything; the buffers are kept for the next step."""
        self._free.extend(block for block in self.blocks.values() if block is not self._home)
        self.blocks.clear()
        self.stats.clear()
        self.losses.clear()
