"""A loop's `Link` without a control plane."""

from __future__ import annotations

from trainer.loop.link import NoLink
from trainer.recovery.heal import Newcomer


class QuietLink(NoLink):
    """For a run that nothing happens to, and that saves nothing."""

    def caught_up(self, newcomer: Newcomer) -> None:
        """See Link."""
        raise AssertionError("nobody heals")

    def heal_failed(self, reason: str) -> None:
        """See Link."""
        raise AssertionError(reason)

    def compared(self, step: int, checksums: list[int | None], *, alike: bool) -> None:
        """See Link."""
        raise AssertionError("nothing is compared")
