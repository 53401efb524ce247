"""What the user writes about a training that goes wrong (`HealthConfig.training`). Imports without
torch and Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from health.training import Limits
from trainer.errors import ConfigError, check_types

_FIELD = "health.training"

Action = Literal["warn", "stop", "skip_data"]
"""Note it; end the run; go back to a checkpoint before it, and pass over the samples of it."""


@dataclass(frozen=True, kw_only=True)
class TrainingHealthConfig:
    """What counts as trouble in the losses and gradient norms of a run, and what is done then."""

    on_loss_spike: Action = "warn"
    """Where the loss stands out for `spike_steps` in a row."""
    on_norm_spike: Action = "warn"
    """Where the gradient norm does."""
    on_no_progress: Literal["warn", "stop"] = "warn"
    """Where the loss does not fall in `progress_steps`."""
    on_nonfinite: Action = "stop"
    """Where `health.max_nonfinite_steps` in a row are not finite. "warn": such steps are passed
    over without end."""
    window_steps: int = 100
    """Steps before that a step is held against."""
    spike_steps: int = 3
    """Steps in a row that must stand out."""
    loss_sigmas: float | None = 8.0
    """A loss stands out where it lies so many spreads above the median of the window (the spread is
    1.4826 times the median absolute deviation, and 1% of the median at least); None: none does."""
    norm_sigmas: float | None = 20.0
    """The same of a gradient norm, before clipping."""
    progress_steps: int | None = 2000
    """The median loss over the window must fall in so many steps; None: it need not."""
    skip_steps: int = 50
    """With "skip_data": as many global batches are passed over, from the first step that stood out
    on; `spike_steps` and `max_nonfinite_steps` at least."""
    max_skips: int = 3
    """Times that data may be passed over in a run; then it ends."""

    def __post_init__(self) -> None:
        check_types(self, _FIELD)

    def check(self, max_nonfinite_steps: int) -> None:
        """Raises ConfigError where a number is out of its range.

        Args:
            max_nonfinite_steps: of `HealthConfig`.
        """
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not value > 0:
                raise ConfigError(f"{_FIELD}.{name}", value, "not positive", "Use 1 or more")
        least = max(self.spike_steps, max_nonfinite_steps)
        if self.skips_data and self.skip_steps < least:
            raise ConfigError(
                f"{_FIELD}.skip_steps",
                self.skip_steps,
                f"the trouble itself takes up to {least} steps, whose samples would come again",
                f"Use {least} or more",
            )

    @property
    def skips_data(self) -> bool:
        """Whether anything leads to data being passed over."""
        return "skip_data" in (self.on_loss_spike, self.on_norm_spike, self.on_nonfinite)

    def limits(self, max_nonfinite_steps: int) -> Limits:
        """What is put up with."""
        return Limits(
            window_steps=self.window_steps,
            spike_steps=self.spike_steps,
            loss_sigmas=self.loss_sigmas,
            norm_sigmas=self.norm_sigmas,
            nonfinite_steps=max_nonfinite_steps,
            progress_steps=self.progress_steps,
        )
