"""Tells of the run every few seconds: to Prometheus, and in the run directory.

    every PULSE_S:  events and steps so far, who is there ──► gauges of Ray (`reporting/meter.py`)
                                                          └─► pulse.json (`protocol/pulse.py`)

No step waits for it, and where it fails the run goes on: then the pulse stands still, and whoever
watches the run (`elastic watch`) says so. The gauges do not wait for the file, whose storage may
hang. The run's end waits a moment, for the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence

from elastic.coordinator.aside import Aside
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.pulse import PULSE_S, Pulse, write_pulse
from elastic.ray_compat.gauges import Gauges
from elastic.reporting.event_log import last_step
from elastic.reporting.meter import Meter, Standing
from elastic.reporting.metrics import METRICS, Sample

log = logging.getLogger(__name__)

RUN_TAG = "ray_train_run_name"
"""Ray Train's own label for the run: its dashboards' filters find these metrics, too."""

_LAST_S = 5.0
"""The run's end waits so long for the last pulse: a file system may hang."""


class Pulses:
    """Follows the run's records.

    Args:
        config: the run.
        membership: knows who is there.
        workers: know what is used up of the budgets.
        records: tell what happens.
        aside: where all this is done, with a thread for the gauges and one for the file.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        membership: Membership,
        workers: Workers,
        records: RunLog,
        aside: Aside,
    ) -> None:
        self._config, self._membership = config, membership
        self._workers, self._aside = workers, aside
        self._meter = Meter(config.started, config.groups.min_replicas)
        self._gauges = Gauges({RUN_TAG: config.started.name})
        self._begun = False
        self._ended = asyncio.Event()
        self._spareless_since: float | None = None
        self._writing: asyncio.Future[None] | None = None
        """The file, on its way."""
        records.followers.append(self._meter.take)

    def replay(self, happened: Iterable[events.Event]) -> None:
        """Takes up what a coordinator before this one has counted."""
        last = last_step(self._config.paths.steps, lambda _: True, lenient=True)
        if last is not None and last.generation <= self._config.generation:
            last = None  # of a start before this one, as all further back: there may be a million
        self._meter.replay(happened, last)

    def take_steps(self, taken: Iterable[events.StepRecord]) -> None:
        """Steps were written down."""
        for record in taken:
            self._meter.take_step(record)

    def begin(self) -> None:
        """The supervisor is there."""
        if not self._begun:
            self._begun = True
            self._aside.spawn(self._beat())

    async def finish(self) -> None:
        """Call it at the run's end, also before `begin`: a coordinator that was started anew just
        before may not have been asked yet. Waits until the end is told, or for so long."""
        if self._membership.stopped is not None:
            self.begin()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _LAST_S)

    async def _beat(self) -> None:
        goes_on = True
        try:
            while goes_on:
                goes_on = await self._aside.goes_on_for(PULSE_S)  # once more when the run is over
                await self._pulse_once(last=not goes_on)
        finally:
            self._ended.set()

    async def _pulse_once(self, *, last: bool) -> None:
        now = time.time()
        standing = self._standing()
        steps = self._membership.progress.recorded
        samples = list(self._meter.samples(now, steps, standing))
        pulse = self._pulse(now, standing)
        await self._aside.on_thread(self._set, samples)
        if last and self._writing is not None:
            await self._writing
        if self._writing is None or self._writing.done():
            self._writing = self._aside.on_thread(self._write, pulse)
        if last:
            await self._writing

    def _standing(self) -> Standing:
        progress, most = self._membership.progress, self._config.health
        spent = self._workers.spent()
        in_vain = (progress.spent_in_vain, most.max_regroups_without_progress)
        return Standing(
            workers=len(self._workers.started),
            spares=len(self._membership.places.idle),
            spent={**spent, "max_regroups_without_progress": in_vain},
            over=self._membership.stopped is not None,
        )

    def _pulse(self, now: float, standing: Standing) -> Pulse:
        started, groups = self._config.started, self._config.groups
        if standing.spares or not started.layout["spares"]:
            self._spareless_since = None
        elif self._spareless_since is None:
            self._spareless_since = now
        return Pulse(
            time=now,
            steps=self._membership.progress.recorded,
            planned_steps=started.steps,
            stepped=self._meter.stepped,
            step_s=self._meter.step_s,
            replicas=self._meter.replicas,
            min_replicas=groups.min_replicas,
            spares=standing.spares,
            planned_spares=started.layout["spares"],
            spareless_since=self._spareless_since,
            spent=standing.spent,
        )

    def _set(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            what = METRICS[sample.name].help
            self._gauges.set(sample.name, sample.value, sample.tags, what)

    def _write(self, pulse: Pulse) -> None:
        try:
            write_pulse(self._config.paths.pulse, pulse)
        except OSError as error:
            log.warning("the run's pulse was not written: %s", error)
