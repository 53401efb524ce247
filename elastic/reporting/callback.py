"""What a program of the user's does while its run goes on: `ElasticTrainer(callbacks=...)`."""

from __future__ import annotations

from elastic.protocol.events import Event, StepRecord
from elastic.reporting.report import Report


class Callback:
    """Told what the records of a run say. Override what you need.

    All is called in the driver's process, on the one thread that follows the run's files. No worker
    waits for it, so a step takes no longer; what comes after it is told later, the progress line
    included, and `fit` returns after `on_end`. A callback that raises is logged with its name and
    is not called again; the run goes on.

    A run that is continued tells of its present start only.
    """

    def on_step(self, record: StepRecord) -> None:
        """A step is committed and recorded, within a second of its commit as a rule.

        Steps come in order, each once. Where the run went back to a saved state, it takes some
        again: they come again, and what was told of that step and of later ones is void.
        """

    def on_event(self, event: Event) -> None:
        """Something happened; events come in the order of `events.jsonl`. Steps that were recorded
        before it have been told before it or come with it, in the order of their times."""

    def on_end(self, report: Report) -> None:
        """The run has ended, well or not (`report.outcome`); nothing is called after this."""
