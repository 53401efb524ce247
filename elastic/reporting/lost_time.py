"""What losses of workers took from training, while a run goes on: the report's own reckoning of
incidents, over events that are dropped as soon as their incident is over. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from elastic.protocol import events
from elastic.reporting.incidents import find_incidents

_PHASES = ("decide", "abort", "roster", "first_step")


class LostTime:
    """Takes the records of one start of a run."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_PHASES, 0.0)
        """Phase -> seconds, of incidents that are over."""
        self._open: list[events.Event] = []

    def take(self, event: events.Event) -> None:
        """Something happened. A lost spare stops nobody."""
        lost = isinstance(event, events.WorkerLost) and event.slot is not None
        kinds = events.RegroupCalled | events.RegroupGathered | events.RegroupDone
        if lost or isinstance(event, kinds):
            self._open.append(event)

    def take_step(self, record: events.StepRecord) -> None:
        """The first step after a roster ends what came before that."""
        if self._open:
            self.close([record])

    def close(self, steps: Sequence[events.StepRecord]) -> None:
        """Counts what has come to a roster, before the first of `steps` where there are any."""
        over = [
            index
            for index, event in enumerate(self._open)
            if isinstance(event, events.RegroupDone)
            and all(event.time <= step.time for step in steps)
        ]
        if not over:
            return
        done, self._open = self._open[: over[-1] + 1], self._open[over[-1] + 1 :]
        incidents = find_incidents(done, steps)
        for incident in incidents:
            for phase in _PHASES:
                self.seconds[phase] += getattr(incident, f"{phase}_s") or 0.0
        # One step is the first one after all of them: the time of each ends where the next begins.
        for before, after in pairwise(incidents):
            if before.first_step_s is not None:
                twice_s = min(before.first_step_s, steps[0].time - after.time)
                self.seconds["first_step"] -= max(0.0, twice_s)
