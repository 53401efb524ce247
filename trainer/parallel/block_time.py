"""How long a device works on a block, without what its worker waits for before it.

Inside a replica a slow worker holds its peers up in the collectives between the blocks, so the
stream of each takes equally long. FSDP2 waits for a block's parameters in a hook, outside the
block's `forward`: what passes there is the worker's own, but for the collectives of those that
share its samples (tensor, context, a user's dimensions), which are inside. Marks round one block
cost the host some microseconds for each micro-batch, and the device none. Decision:
docs/decisions/050.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from trainer.parallel.compiled import trains

_SHARE = 3
"""Forward and backward, in forwards."""

Span = tuple[Any, Any]
"""Marks at the beginning and the end of a forward."""


class BlockTimes:
    """Those of one block of a model.

    Args:
        stamp: a mark of now, on the device.
    """

    def __init__(self, stamp: Callable[[], Any]) -> None:
        self._stamp = stamp
        self._blocks = 0
        self._spans: list[Span] | None = None

    def cover(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Notes each forward in training of the block in the middle. In place, before FSDP2 and
        after all else. Nothing where the blocks are parts of others, as experts are, which have
        more to do on one worker than on another.

        Args:
            model: the model.
            blocks: names of its repeated blocks.
        """
        self._blocks = len(blocks)
        if blocks and not any(part.isdigit() for part in blocks[0].split(".")[:-1]):
            block = model.get_submodule(blocks[len(blocks) // 2])
            block.forward = partial(self._timed, block, block.forward)

    def _timed(
        self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._spans is None or not trains(block):
            return forward(*args, **kwargs)
        begin = self._stamp()
        found = forward(*args, **kwargs)
        self._spans.append((begin, self._stamp()))
        return found

    def take(self) -> list[Span]:
        """What was noted since it was asked last; from the first time on it is."""
        spans, self._spans = self._spans, []
        return spans or []

    def whole_s(self, spans: Sequence[Span], between: Callable[[Any, Any], float]) -> float:
        """About as long as forward and backward of all blocks take: a measure to compare workers
        by, which have the same blocks.

        Args:
            spans: some, which the device has passed.
            between: seconds from one mark to another.
        """
        return _SHARE * self._blocks * sum(between(begin, end) for begin, end in spans)
