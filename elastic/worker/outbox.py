"""What a worker reports to the run's records: steps and events, queued and sent by a thread.

Every worker queues every step, and the lead alone sends them: if it is lost, the next one has the
same records. So a step stays queued until it is known to be recorded: to the lead by the
coordinator's answer, to the others by the lead's word in a later commit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import ray

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.events import Event, StepRecord
from elastic.protocol.messages import Answer, Run
from elastic.protocol.rpc import Remote

log = logging.getLogger(__name__)

_SEND_INTERVAL_S = 0.5
"""A call takes the coordinator the better part of a millisecond, whatever few steps are in it."""
_MOST_STEPS = 1000
"""In a call. Each has a digest for each lane; the coordinator takes other calls in between."""


class Outbox:
    """`step` and `event` only queue; the rest may wait for the coordinator.

    Args:
        coordinator: the run's coordinator actor.
        save_wanted: called with what the coordinator answers the lead: whether it wants a
            checkpoint.
    """

    def __init__(
        self, coordinator: Remote[CoordinatorApi], save_wanted: Callable[[bool], None]
    ) -> None:
        self._coordinator, self._save_wanted = coordinator, save_wanted
        # Without bound: the coordinator may be away for long.
        self._steps: deque[StepRecord] = deque()
        self._events: deque[Event] = deque()
        self._lead, self._recorded = False, 0
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="report", daemon=True).start()

    def step(self, record: StepRecord) -> None:
        """Queues a committed step."""
        self._steps.append(record)

    def event(self, event: Event) -> None:
        """Queues an event."""
        self._events.append(event)

    def recent(self) -> tuple[StepRecord, ...]:
        """The steps queued; what was being sent has arrived."""
        with self._sending:
            return tuple(self._steps)

    @property
    def recorded(self) -> int:
        """Steps that the records hold, as far as the lead knows; 0 where this is not its worker."""
        return self._recorded if self._lead else 0

    def let_go(self, recorded: int) -> None:
        """So many steps are in the records, as the lead says. It lets go of its own when it has
        sent them."""
        if not self._lead:
            self._drop(recorded)

    def settle(self, answer: Answer) -> None:
        """The coordinator answered this worker's join: lets go of what it has, or what is void."""
        with self._sending:
            self._lead = isinstance(answer, Run) and answer.lead
            if isinstance(answer, Run):
                self._recorded = answer.recorded
                self._drop(answer.recorded)
                if answer.restore:
                    self._steps.clear()

    def _drop(self, recorded: int) -> None:
        while self._steps and self._steps[0].step < recorded:
            self._steps.popleft()

    def flush(self) -> None:
        """Sends what is queued, and waits until the coordinator has it; events with the last of the
        steps that came before them."""
        with self._sending:
            steps = list(self._steps) if self._lead else []
            happened = list(self._events)
            while len(steps) > _MOST_STEPS:
                self._send(steps[:_MOST_STEPS], [])
                steps = steps[_MOST_STEPS:]
            if steps or happened:
                self._send(steps, happened)

    def _send(self, steps: list[StepRecord], happened: list[Event]) -> None:
        answer = self._coordinator.call(CoordinatorApi.record, steps, happened)
        self._recorded = answer.steps
        if steps:
            self._save_wanted(answer.save_wanted)
        for queue, sent in ((self._steps, steps), (self._events, happened)):
            for _ in sent:
                queue.popleft()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_SEND_INTERVAL_S):
            try:
                self.flush()
            except ray.exceptions.RayActorError:
                return
            except ray.exceptions.RayError as error:
                log.warning("records are sent again: %s", error)
