"""What a worker knows of its part of the newest checkpoints, to tell what has not changed since."""

from __future__ import annotations

from collections.abc import Mapping

from checkpointing import Attempt, KnownPart, TensorSlice

Parts = Mapping[TensorSlice, KnownPart]


class KnownParts:
    """One worker's memory of what it has written. Only the thread of its one save uses it.

    A save counts when it is committed, which the coordinator knows. Until a newer one counts, both
    it and those after it are kept: they may still be committed, or never be.
    """

    def __init__(self) -> None:
        self._written: dict[tuple[int, int], Parts] = {}

    def add(self, attempt: Attempt, parts: Parts) -> None:
        """Remembers a save that was handed in."""
        self._written[attempt.step, attempt.generation] = parts

    def of(self, committed: tuple[int, int] | None) -> Parts:
        """What this worker wrote of the newest committed checkpoint, given as (step, generation);
        nothing for None, or where it had no part in it."""
        if committed is None:
            self._written.clear()
            return {}
        self._written = {save: p for save, p in self._written.items() if save >= committed}
        return self._written.get(committed, {})
