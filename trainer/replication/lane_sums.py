"""Gradients of the lanes that one worker has computed in the current step.

They outlive an interrupted step: after a regroup a replica computes only the lanes it does not have
yet. Those of the lost replica are dealt to the others; a lane that the sum has been written over is
computed again, too.

The buffer for the sum of all replicas, its home, serves lanes, too, and is left by what is added
up: as the last lane is added to those before it, home becomes free, from the front on, and the sum
of all replicas follows. Where nothing can be added up, as with a single lane, the sum is written
over what is there. So 2**n lanes take n + 1 buffers in all, and no order of the same sums takes
fewer: when the last lane comes, each of the n subtrees beside its way to the root is somewhere, and
none of them can have been added to another.
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
        dtype: that each lane's gradient and each sum are rounded to. The buffers are float32.
    """

    def __init__(
        self,
        total_lanes: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._total, self._length, self._device = total_lanes, length, device
        self._dtype, self._open = dtype, torch.empty(0)
        self._free: list[torch.Tensor] = []
        self._home: torch.Tensor | None = None
        self._alone = False
        self.blocks: dict[Node, torch.Tensor] = {}
        self.stats: dict[int, LaneStats] = {}
        self.losses: dict[int, torch.Tensor] = {}
        """Lane -> the sum of its losses, a float64 where it was computed."""
        self._additions: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._settled = 0
        self.step = -1
        self.overwritten = False
        """The sum of all replicas has been written to `home`, in whole or in part."""

    def begin(
        self, step: int, lanes: Sequence[int], home: torch.Tensor, *, alone: bool
    ) -> list[int]:
        """Starts or continues `step` with the lanes dealt to this replica.

        Args:
            step: the current step.
            lanes: this replica's.
            home: where the sum of all replicas' lanes goes.
            alone: there are no other replicas, so that the sum of all lanes is the replica's own:
                it is added up where it belongs.

        Returns:
            The lanes still to be computed. Sums of another step, or with lanes that are no longer
            this replica's, are dropped, and so are those that the sum was written over.
        """
        if step != self.step or not set(self.stats) <= set(lanes):
            self.clear()
            self.step = step
        elif self.overwritten:
            self._drop_home()
        self._home, self._alone, self.overwritten = home, alone, False
        return [lane for lane in lanes if lane not in self.stats]

    def _drop_home(self) -> None:
        for node in [node for node, block in self.blocks.items() if block is self._home]:
            del self.blocks[node]
            for lane in range(*node):
                del self.stats[lane], self.losses[lane]

    def open(self, lane: int) -> torch.Tensor:
        """Gives `lane` its place in the tree, and a flat float32 buffer to put its gradient in.

        `settle` does the additions as the gradient comes in, and `close` ends the lane.
        """
        gradient = self._open = self._buffer()
        self.blocks[(lane, lane + 1)] = gradient
        self._additions, self._settled = [], 0
        held = {lane for node in self.blocks for lane in range(*node)}
        for node in blocks_of(held, self._total):
            self._merge(node)
        return gradient

    def _buffer(self) -> torch.Tensor:
        assert self._home is not None
        if not any(block is self._home for block in self.blocks.values()):
            return self._home
        return self._free.pop() if self._free else self._new()

    def _new(self) -> torch.Tensor:
        return torch.zeros(self._length, device=self._device)

    def _merge(self, node: Node) -> torch.Tensor:
        """Puts the sum of a whole subtree where one of its parts is, but leaves `home` free for the
        sum of all replicas."""
        if node in self.blocks:
            return self.blocks[node]
        left, right = (self._merge(child) for child in split(node))
        for child in split(node):
            del self.blocks[child]
        into = right if left is self._home else left
        if self._alone and node == (0, self._total):
            assert self._home is not None
            into = self._home
        self._additions.append((left, right, into))
        self._free += [
            part for part in (left, right) if part is not into and part is not self._home
        ]
        self.blocks[node] = into
        return into

    def settle(self, stop: int) -> None:
        """Adds up every subtree that the open lane makes whole, in its first `stop` numbers: they
        are in its buffer."""
        part = slice(self._settled, stop)
        self._round(self._open[part])
        for left, right, into in self._additions:
            torch.add(left[part], right[part], out=into[part])
            self._round(into[part])
        self._settled = stop

    def _round(self, numbers: torch.Tensor) -> None:
        if self._dtype != torch.float32:
            numbers.copy_(numbers.to(self._dtype))

    def close(self, lane: int, stats: LaneStats, loss: torch.Tensor) -> None:
        """The lane's whole gradient has been settled; its losses add up to `loss`."""
        self.stats[lane], self.losses[lane] = stats, loss

    def clear(self) -> None:
        """Forgets everything; the buffers are kept for the next step."""
        self._free.extend(block for block in self.blocks.values() if block is not self._home)
        self.blocks.clear()
        self.stats.clear()
        self.losses.clear()
        self.overwritten = False
