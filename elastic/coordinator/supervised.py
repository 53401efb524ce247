"""A run whose supervisor is gone for good ends: nobody would start workers, and nobody clear up."""

from __future__ import annotations

import asyncio
import logging
import time

from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog, await_closed
from elastic.ray_compat.cluster import end_actors, end_own_actor
from elastic.ray_compat.groups import end_all
from health.lease import AwakeClock

log = logging.getLogger(__name__)

_LOOKS = 10
"""Times within the lease that it is looked at."""


class Supervised:
    """The supervisor's lease, which it renews with every question whether the coordinator answers.

    Args:
        config: how long it lasts, and the names of all that is to be ended.
        dispatcher: tells the workers.
        records: where it is written down.
    """

    def __init__(self, config: CoordinatorConfig, dispatcher: Dispatcher, records: RunLog) -> None:
        self._limit_s, self._config = config.health.supervisor_timeout_s, config
        self._dispatcher, self._records = dispatcher, records
        self._clock = AwakeClock(self._limit_s / _LOOKS)
        self._renewed_s = 0.0

    def begin(self) -> None:
        """The lease begins, with the coordinator: there may be neither supervisor nor workers, only
        placement groups that hold machines, or wait for some. Called once, on the event loop."""
        self.renew()
        self._dispatcher.spawn(self._check())

    def renew(self) -> None:
        """The supervisor is there."""
        self._renewed_s = self._clock.tick(time.monotonic())

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(self._limit_s / _LOOKS)
            silent_s = self._clock.tick(time.monotonic()) - self._renewed_s
            if silent_s > self._limit_s:
                break
        reason = (
            f"its supervisor was not heard for {silent_s:.0f} s "
            f"(health.supervisor_timeout_s = {self._limit_s:g})"
        )
        log.error("the run is ended: %s", reason)
        await self._dispatcher.stop(reason)
        try:
            await await_closed(self._records.end("failed", reason))
        except OSError:
            log.exception("the end of the run is in no record")
        while True:  # nobody else would
            try:
                # A frozen supervisor holds the lock and the name, and whoever asks it waits. First:
                # once it is let go on, it would start workers.
                await asyncio.to_thread(end_actors, self._config.paths.key)
                await asyncio.to_thread(end_all, self._config.prefix)
                end_own_actor()
            except Exception:  # Ray may be unreachable for a while
                log.exception("something of the run is left; it is tried again")
            await asyncio.sleep(self._limit_s / _LOOKS)
