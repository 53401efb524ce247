"""When the next checkpoint is due by the clock, or because the coordinator asked for one.

The lead worker decides, and its word travels with the commit, so that all workers save before the
same step. The clock counts where `checkpoint.every_steps` is "auto"; what it goes by is measured
here, on every worker, because each may become the lead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from checkpointing import CheckpointConfig, estimate_mtbf, plan_interval


class SaveSchedule:
    """`wanted` is asked before each commit, and reads plain numbers.

    Args:
        config: whether the clock counts, and its bounds.
        now_s: a clock, in seconds.
    """

    def __init__(
        self, config: CheckpointConfig, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._auto, self._now_s = config, config.every_steps == "auto", now_s
        self._started_s = self._saved_s = now_s()
        self._held_s = self._write_s = 0.0
        self._failures = 0
        self._asked = False
        self._next_s = self._saved_s + self.interval_s()

    def interval_s(self) -> float:
        """Seconds between two checkpoints, from what is known now."""
        config = self._config
        return plan_interval(
            held_s=self._held_s,
            write_s=self._write_s,
            mtbf_s=estimate_mtbf(
                prior_s=config.auto_mtbf_s,
                running_s=self._now_s() - self._started_s,
                failures=self._failures,
            ),
            least_s=config.auto_least_s,
            most_s=config.auto_most_s,
        )

    def wanted(self) -> bool:
        """Whether a checkpoint is asked for, after the step that is being committed."""
        return self._asked or (self._auto and self._now_s() >= self._next_s)

    def ask(self, wanted: bool) -> None:
        """Whether the coordinator wants a checkpoint now."""
        self._asked = wanted

    def failed(self) -> None:
        """Somebody was lost."""
        self._failures += 1
        self._plan()

    def saved(self, held_s: float) -> None:
        """A checkpoint was begun, and held up the training for so long."""
        self._asked = False
        self._saved_s, self._held_s = self._now_s(), held_s
        self._plan()

    def written(self, write_s: float, held_s: float) -> None:
        """That checkpoint was written, so long after it was begun. The next step was held up for
        so long, too, by the copy."""
        self._write_s = write_s
        self._held_s += held_s
        self._plan()

    def _plan(self) -> None:
        self._next_s = self._saved_s + self.interval_s()
