"""What a program of the user's does while its run goes on: `ElasticTrainer(callbacks=...)`."""

from __future__ import annotations

from elastic.protocol.events import Event, StepRecord
from elastic.reporting.report import Report


class Callback:
    """Told what the records of a run say. Override what you need.

    All is called in the driver's process, on the one thread that follows the run's files. No worker
    waits for it, so no step takes longer; but what is next is told later, the progress line
    included, and `fit` returns after `on_end`. A callback that raises is logged with its name and
    not called again; the run goes on. A run that is continued tells of its present start only, a
    driver that attaches of what is recorded from then on, and `fit(detach=True)` of nothing.
    """

    def on_step(self, record: StepRecord) -> None:
        """A step is committed, and recorded since: told within a second as a rule, and once.

        Steps come in order. A run that went back to saved state takes some again, and they are told
        again: then what was told of that step and of all after it is void.
        """

    def on_event(self, event: Event) -> None:
        """Something happened: told once, in the order of `events.jsonl`, among the steps by its
        time."""

    def on_end(self, report: Report) -> None:
        """The run has ended, well or not (`report.outcome`). Nothing is called after this."""
