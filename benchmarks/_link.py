"""A loop's `Link` without a control plane."""

from __future__ import annotations

from typing import Any

from trainer.replication.step_commit import Saving


class QuietLink:
    """A Link for a run that nothing happens to."""

    def leave_now(self) -> bool:
        """See Link."""
        return False

    def leave_at_boundary(self) -> bool:
        """See Link."""
        return False

    def saving(self) -> Saving:
        """See Link."""
        return Saving()

    def at_step(self, step: int, phase: str) -> None:
        """See Link."""

    def committed(self, commit: Any, lr: float, applied: bool) -> None:
        """See Link."""
