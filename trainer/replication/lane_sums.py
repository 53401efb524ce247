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

Where the device is to hold fewer, what is whole waits in the host's memory meanwhile, the oldest
first, and is read from there, a piece at a time, when it is added up or sent. So the lanes of a
lost replica need no more of the device than those of an undisturbed step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from trainer.replication.lanes import Node, blocks_of, split
from trainer.replication.step_commit import DIGEST_BITS, LaneStats

log = logging.getLogger(__name__)

_LOW_BITS = 2**DIGEST_BITS - 1

_PIECE = 1 << 24
"""Numbers that are brought back from the host at once."""


class LaneSums:
    """Sums of whole subtrees of lanes, added up in tree order as lanes come in.

    Args:
        total_lanes: lanes of the run.
        length: numbers in a gradient buffer, padding included.
        device: where the buffers live.
        dtype: that each lane's gradient and each sum are rounded to. The buffers are float32.
        most: buffers on the device, home among them; None: as many as are needed.
        traced: whether anybody will ask for `gradients`; to read each lane once more takes time.
    """

    def __init__(
        self,
        total_lanes: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        most: int | None = None,
        *,
        traced: bool = True,
    ) -> None:
        self._total, self._length, self._device = total_lanes, length, device
        self._dtype, self._open, self._traced = dtype, torch.empty(0), traced
        self.most = most
        """See Args."""
        self._made = 1
        self._free: list[torch.Tensor] = []
        self._free_on_host: list[torch.Tensor] = []
        self._waiting: dict[Node, torch.Tensor] = {}
        self._home: torch.Tensor | None = None
        self._alone = False
        self.blocks: dict[Node, torch.Tensor] = {}
        """Subtree -> its sum, on the device or on the host."""
        self.stats: dict[int, LaneStats] = {}
        self.losses: dict[int, torch.Tensor] = {}
        """Lane -> the sum of its losses, a float64 where it was computed."""
        self.gradients: dict[int, torch.Tensor] = {}
        """Lane -> the sum of its gradient's bits, where it was computed; 0 if not `traced`."""
        self._bits = torch.zeros((), dtype=torch.int64)
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

    def reserve_on_host(self) -> None:
        """Makes what one buffer takes there now. To pin gigabytes takes seconds, which the first
        step after a loss would take. Where the host has no room, that step tries again."""
        try:
            self._free_on_host.append(self._new_on_host())
        except RuntimeError as error:
            log.warning(
                "the host has no %.1f GB to pin for a lane of a lost replica: %s",
                self._length * torch.float32.itemsize / 1e9,
                error,
            )

    def is_new(self, step: int) -> bool:
        """Whether nothing of `step` is held."""
        return step != self.step or not self.stats

    def _drop_home(self) -> None:
        for node in [node for node, block in self.blocks.items() if block is self._home]:
            del self.blocks[node]
            for lane in range(*node):
                del self.stats[lane], self.losses[lane], self.gradients[lane]

    def open(self, lane: int) -> torch.Tensor:
        """Gives `lane` its place in the tree, and a flat float32 buffer to put its gradient in.

        `settle` does the additions as the gradient comes in, and `close` ends the lane.
        """
        gradient = self._open = self._buffer()
        self.blocks[(lane, lane + 1)] = gradient
        self._additions, self._settled = [], 0
        self._bits = torch.zeros((), dtype=torch.int64, device=self._device)
        held = {lane for node in self.blocks for lane in range(*node)}
        for node in blocks_of(held, self._total):
            self._merge(node)
        return gradient

    def _buffer(self) -> torch.Tensor:
        assert self._home is not None
        if not any(block is self._home for block in self.blocks.values()):
            return self._home
        if self._free:
            return self._free.pop()
        if self.most is not None and self._made >= self.most:
            return self._send_to_host()
        self._made += 1
        return self._new()

    def _new(self) -> torch.Tensor:
        return torch.zeros(self._length, device=self._device)

    def _new_on_host(self) -> torch.Tensor:
        return torch.empty(self._length, pin_memory=self._device.type == "cuda")

    def _send_to_host(self) -> torch.Tensor:
        """The buffer of the subtree that has been whole for longest, which waits elsewhere now."""
        node = next(node for node in self.blocks if node not in self._waiting)
        buffer = self.blocks[node]
        there = self._free_on_host.pop() if self._free_on_host else self._new_on_host()
        there.copy_(buffer, non_blocking=True)
        self.blocks[node] = self._waiting[node] = there
        return buffer

    def _let_go(self, node: Node, into: torch.Tensor | None = None) -> None:
        """Forgets a subtree. Its buffer is free, unless that is home, or `into`."""
        block = self.blocks.pop(node)
        if self._waiting.pop(node, None) is not None:
            self._free_on_host.append(block)
        elif block is not self._home and block is not into:
            self._free.append(block)

    def _merge(self, node: Node) -> torch.Tensor:
        """Puts the sum of a whole subtree where one of its parts is, but leaves `home` free for the
        sum of all replicas, if it can. One part has the open lane, so it is on the device."""
        if node in self.blocks:
            return self.blocks[node]
        children = split(node)
        left, right = (self._merge(child) for child in children)
        left_waits, right_waits = (child in self._waiting for child in children)
        into = right if left_waits or (left is self._home and not right_waits) else left
        if self._alone and node == (0, self._total):
            assert self._home is not None
            into = self._home
        self._additions.append((left, right, into))
        for child in children:
            self._let_go(child, into)
        self.blocks[node] = into
        return into

    def settle(self, stop: int) -> None:
        """Adds up every subtree that the open lane makes whole, in its first `stop` numbers: they
        are in its buffer."""
        if stop == self._settled:
            return
        part = slice(self._settled, stop)
        self._round(self._open[part])
        if self._traced:
            self._bits += _sum_of_bits(self._open, self._settled, stop)
        for left, right, into in self._additions:
            for one, other, out in _pieces(left[part], right[part], into[part]):
                torch.add(_on(out, one), _on(out, other), out=out)
            self._round(into[part])
        self._settled = stop

    def _round(self, numbers: torch.Tensor) -> None:
        if self._dtype != torch.float32:
            numbers.copy_(numbers.to(self._dtype))

    def close(self, lane: int, stats: LaneStats, loss: torch.Tensor) -> None:
        """The lane's whole gradient has been settled; its losses add up to `loss`."""
        self.stats[lane], self.losses[lane], self.gradients[lane] = stats, loss, self._bits

    def clear(self) -> None:
        """Forgets everything; the buffers are kept for the next step."""
        for node in list(self.blocks):
            self._let_go(node)
        self.stats.clear()
        self.losses.clear()
        self.gradients.clear()
        self.overwritten = False


def _pieces(*ranges: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Equal ranges, a piece of each at a time where one of them comes from the host."""
    if len({numbers.device for numbers in ranges}) == 1:
        return iter([ranges])
    return zip(*(numbers.split(_PIECE) for numbers in ranges), strict=True)


def _on(like: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`numbers` on the device of another tensor."""
    return numbers.to(like.device, non_blocking=True)


def _sum_of_bits(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The sum of float32s, two at a time as one int64, wherever they are cut; as int32s they would
    be copied to int64s first."""
    first, last = start + start % 2, stop - stop % 2
    total = flat[first : max(first, last)].view(torch.int64).sum()
    if first > start:
        total = total + (flat[start:first].view(torch.int32).long().sum() << 32)
    if stop > last:
        total = total + (flat[last:stop].view(torch.int32).long().sum() & _LOW_BITS)
    return total


def gradient_digests(bits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sums of bits (`LaneSums.gradients`) folded to what a float64 holds exactly, also when the
    workers of a replica are added up: 32 bits, as float64s on their device."""
    if not bits:
        return []
    whole = torch.stack(list(bits))
    return list(((whole ^ (whole >> DIGEST_BITS)) & _LOW_BITS).double())
