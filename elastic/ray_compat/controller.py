"""Ray Train's controller, for workers that come and go while the others train."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import ObjectRef
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError

from elastic.errors import ResourcesError
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote, restarting
from elastic.providers.sigterm import catch_sigterm
from elastic.ray_compat.placement import FutileStarts, Wanted
from elastic.ray_compat.workers import ElasticWorkerGroup, SeatedWorker

log = logging.getLogger(__name__)

MOST_FUTILE_STARTS = 5
"""Times that workers end before any new one has said hello: where no other is at work, nothing is
going to start."""

FAREWELL_S = 10.0
"""How long workers may go on when the run is over. All that counts has been written by then."""


class _ElasticBackend(Backend):
    """Sets up no process groups: those are ours, per replica and generation."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Runs on the main thread of new workers: first ones, replacements and additions."""
        worker_group.execute(catch_sigterm)


class ElasticBackendConfig(BackendConfig):
    """Tells Ray Train that each worker stands for itself.

    Args:
        wanted: the workers of the run when all its machines are there.
        coordinator: is told how many workers the run starts with.
        prefix: the names of placement groups and workers begin with it; nobody else's do.
        silent_s: for so long a healthy worker may answer no call.
        wait_s: how long the start waits for the resources of the smallest layout.
    """

    def __init__(
        self,
        wanted: Wanted,
        coordinator: Remote[CoordinatorApi],
        prefix: str,
        *,
        silent_s: float,
        wait_s: float,
    ) -> None:
        self.wanted, self.coordinator, self.prefix = wanted, coordinator, prefix
        self.silent_s, self.wait_s = silent_s, wait_s

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend that the controller asks."""
        return _ElasticBackend


class CoordinatorDecides(FailurePolicy):
    """The run goes on until the coordinator says that it is over, or nothing starts any more."""

    def __init__(self, coordinator: Remote[CoordinatorApi]) -> None:
        super().__init__(FailureConfig(max_failures=-1))
        self._coordinator = coordinator
        self._futile = FutileStarts()
        self._over: ObjectRef[None] | None = None

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """See FailurePolicy. Asked where the first workers do not start, and at the end. Want of
        room ends the run: it was waited for, and is no start that failed."""
        lacks_room = isinstance(training_failed_error, ControllerError) and isinstance(
            training_failed_error.controller_failure, ResourcesError
        )
        over = lacks_room or self.ends_run(newest=math.inf, launches=0, others=False, heard=False)
        return FailureDecision.RAISE if over else FailureDecision.RETRY

    def ends_run(self, *, newest: float, launches: int, others: bool, heard: bool) -> bool:
        """Whether the run ends now that workers have ended.

        Args:
            newest: see FutileStarts.
            launches: see there.
            others: whether others are at work: then a machine where nothing starts does no harm.
            heard: see there.
        """
        try:
            verdict, hellos = (
                self._coordinator.call(CoordinatorApi.verdict),
                self._coordinator.call(CoordinatorApi.hellos),
            )
        except ray.exceptions.RayError:
            return True
        self._futile.count(hellos=hellos, newest=newest, launches=launches, heard=heard)
        futile = self._futile.in_a_row >= MOST_FUTILE_STARTS and not others
        return verdict is not None or futile

    def tell(self, ended: list[SeatedWorker]) -> list[float | None]:
        """Tells the coordinator of workers that have ended: not all nodes have an agent. Returns
        for how many seconds each had been there, since its hello; None: it had not said it."""
        known = [(worker.metadata.node_id, worker.metadata.pid) for worker in ended]
        try:
            return self._coordinator.call(CoordinatorApi.ended, known)
        except ray.exceptions.RayError:  # then the run ends
            return [None] * len(ended)

    def over(self) -> bool:
        """Whether the coordinator has ended the run, or died. Costs no call."""
        if self._over is None:
            self._over = self._coordinator.send(CoordinatorApi.over)
        if not ray.wait([self._over], timeout=0)[0]:
            return False
        if restarting(self._over):
            self._over = None
            return False
        return True


class ElasticController(TrainController):
    """Never restarts the group: it dismisses workers that end and seats others, between polls."""

    worker_group_cls = ElasticWorkerGroup
    _over_since: float | None = None

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        status = await super()._poll_workers()
        group: Any = self._worker_group
        policy: Any = self._failure_policy
        workers = list(group.get_workers())
        at_work = find_at_work(status.worker_statuses)
        for position in group.silent() & at_work.keys():
            del at_work[position]
        ended = [worker for i, worker in enumerate(workers) if i not in at_work]
        failures = group.settle()
        if policy.over():
            return self._last_status(status)
        if ended or failures:
            there_s = policy.tell(ended)
            newest = math.inf if failures else max(worker.launch for worker in ended)
            heard = any(for_s is not None for for_s in there_s)
            if policy.ends_run(
                newest=newest, launches=group.launches, others=bool(at_work), heard=heard
            ):
                return _with_failures(status, failures)
            group.dismiss(ended, there_s)
        try:
            group.place()
        except (ray.exceptions.RayError, ConnectionError) as error:
            log.warning("placement is looked after at the next poll: %s", error)
        return WorkerGroupPollStatus(worker_statuses=at_work)

    def _last_status(self, status: WorkerGroupPollStatus) -> WorkerGroupPollStatus:
        """The run is over: waits a little for workers that still run, then ends them."""
        self._over_since = self._over_since or time.monotonic()
        if not status.worker_statuses:
            return _with_failures(status, [RuntimeError("no worker lives at the end of the run")])
        if time.monotonic() - self._over_since < FAREWELL_S:
            return status
        late = RuntimeError(f"still running {FAREWELL_S:g} s after the end of the run")
        return WorkerGroupPollStatus(
            worker_statuses={
                i: WorkerStatus(running=False, error=late) if worker.running else worker
                for i, worker in status.worker_statuses.items()
            }
        )


def find_at_work(statuses: Mapping[int, WorkerStatus]) -> dict[int, WorkerStatus]:
    """The workers of a poll that have not ended, by their positions.

    One that was not reached may live and train: something on the way has reset its connection. It
    is polled again. Ray says of a process that has ended, and of a node that it has given up, that
    the actor died, and the lease of its node finds who is out of reach.
    """
    return {
        i: WorkerStatus(running=True) if _out_of_reach(status) else status
        for i, status in statuses.items()
        if (status.running and not status.error) or _out_of_reach(status)
    }


def _out_of_reach(status: WorkerStatus) -> bool:
    error = status.error
    return isinstance(error, WorkerHealthCheckFailedError) and isinstance(
        error.health_check_failure, ray.exceptions.ActorUnavailableError
    )


def _with_failures(
    status: WorkerGroupPollStatus, failures: list[Exception]
) -> WorkerGroupPollStatus:
    known = status.worker_statuses
    more = {len(known) + i: WorkerStatus(False, error) for i, error in enumerate(failures)}
    return WorkerGroupPollStatus(worker_statuses={**known, **more})
