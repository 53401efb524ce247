"""The supervisor's eye on the coordinator.

A coordinator that ends is started anew by Ray, and no step stops. One that is frozen by a signal,
or whose event loop is stuck, answers nobody, and nothing fails a call to it: the next worker that
is lost would be waited for without end. So the supervisor asks it something every few seconds, and
kills one that is frozen or stuck. On its own node, where both begin, it sees at once that a process
is frozen; elsewhere by the questions alone.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from types import TracebackType

import ray
from ray import ObjectRef

from elastic.node.process_watch import ProcessWatch
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote
from elastic.ray_compat.cluster import process_of
from health.lease import AwakeClock
from health.questions import ANSWER_S, decide_next

log = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_NAME = "coordinator"


class CoordinatorWatch:
    """Watches the coordinator's process, on a thread, for as long as the `with` block lasts.

    Args:
        coordinator: the run's coordinator actor.
    """

    def __init__(self, coordinator: Remote[CoordinatorApi]) -> None:
        self._coordinator = coordinator
        self._processes = ProcessWatch(freeze_timeout_s=math.inf)
        self._watched: int | None = None
        self._clock = AwakeClock(_INTERVAL_S)
        self._questions: list[ObjectRef[None]] = []
        """Those without an answer."""
        self._asked_s = -ANSWER_S
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            try:
                self._look()
            except Exception as error:  # Ray may be unreachable for a while
                log.warning("the coordinator's process is looked for again: %s", error)

    def _look(self) -> None:
        now_s = self._clock.tick(time.monotonic())
        process = process_of(self._coordinator)
        if process is None:  # it starts, which may take its time
            self._questions.clear()
            return
        pid, here = process
        if here and pid != self._watched:
            self._processes.watch(_NAME, pid, heartbeat_fd=None)
            self._watched = pid
        self._processes.ended(timeout_s=0)
        for death in self._processes.frozen(now_s):
            log.warning("the coordinator is killed: %s", death.detail)
        self._question(now_s, here)

    def _question(self, now_s: float, here: bool) -> None:
        if self._questions and ray.wait(self._questions, timeout=0)[0]:
            self._questions.clear()  # answered, or failed with the process
        unanswered = len(self._questions)
        step = decide_next(unanswered, now_s - self._asked_s)
        if step == "ask":
            self._questions.append(self._coordinator.send(CoordinatorApi.awake))
            self._asked_s = now_s
        elif step == "stuck":
            found = f"{unanswered} questions, {ANSWER_S:g} s apart, have no answer"
            log.warning("the coordinator is killed: its event loop is stuck: %s", found)
            if here:
                self._processes.signal(_NAME, signal.SIGKILL)
            else:
                ray.kill(self._coordinator.handle, no_restart=False)
            self._questions.clear()
