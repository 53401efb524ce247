"""A loop's `Link` without a control plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.engine.engine import Engine
from trainer.loop.link import Link
from trainer.loop.phases import Phase
from trainer.recovery.heal import Newcomer
from trainer.replication.step_commit import Commit, Place, Saving


class QuietLink(Link):
    """For a run that nothing happens to, and that saves nothing."""

    def leave_now(self) -> bool:
        """See Link."""
        return False

    def leave_at_boundary(self) -> bool:
        """See Link."""
        return False

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""

    def caught_up(self, newcomer: Newcomer) -> None:
        """See Link."""
        raise AssertionError("nobody heals")

    def heal_failed(self, reason: str) -> None:
        """See Link."""
        raise AssertionError(reason)

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        """See Link."""

    def saving(self) -> Saving:
        """See Link."""
        return Saving()

    def recorded(self) -> int:
        """See Link."""
        return 0

    def save_skipped(self, step: int, places: Sequence[Place]) -> None:
        """See Link."""

    def compared(self, step: int, checksums: list[int | None]) -> None:
        """See Link."""
        raise AssertionError("nothing is compared")

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        """See Link."""
