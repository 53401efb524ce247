"""The supervisor: the actor that a run belongs to, whoever has started it.

It is Ray Train's controller, and what must be there as long as the run: the lock of the run
directory, the watch over the coordinator, the look-out for nodes that Ray drains, the clearing up
at the end. The driver starts it, attaches, and may go.

    driver gone ──────────► nothing changes; the next driver of the same run attaches
    supervisor lost ──────► Ray starts another, on another node if it must be; workers, placement
                            groups and coordinator live on, and it takes them up
    coordinator lost ─────► the same for that (`elastic/coordinator/failover.py`)
    run over ─────────────► everything under the run's prefix is ended, then the supervisor itself

All that outlives a process here is a named actor or placement group (`ray_compat/cluster.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import ray
from ray.train import TrainingFailedError

from elastic.coordinator.run_log import await_closed
from elastic.errors import RunGoesOnError
from elastic.node.process_watch import LOCKED_TIMES
from elastic.node.snapshot_survey import clear_snapshots, end_is_stored, has_kept_snapshots
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.events import RunEnded, RunOutcome
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths, hold_run
from elastic.protocol.supervisor_api import About, Ending, SupervisorApi
from elastic.providers.ray_drain import DrainWatch
from elastic.providers.tell import tell_coordinator
from elastic.ray_compat.cluster import draining_nodes, end_actors, end_own_actor, started_anew
from elastic.ray_compat.groups import end_all
from elastic.ray_compat.kept import Kept
from elastic.ray_compat.trainer import ElasticRayTrainer
from elastic.ray_compat.workers import WorkerNames
from elastic.reporting.conclusion import conclude, ending_of, record_end
from elastic.reporting.event_log import find_end
from elastic.supervisor.coordinator_watch import CoordinatorWatch
from elastic.supervisor.plan import RunPlan
from elastic.worker.entry import train_worker

log = logging.getLogger(__name__)

MOST_DRIVERS = 1000
"""Calls pending in the actor at once: each driver that is attached has one, and each that has left
in the last `WAIT_S`."""

LINGER_S = 10.0
"""How long a run that is over can be asked for its ending. A driver that is attached writes the
report and ends the supervisor before; where there is none, the supervisor does both then."""

_HANDOVER_S = 30.0
"""How long the driver may hold on to the lock of the run directory."""
_LOCK_RETRY_S = 0.2

_HEARD_S = 20.0
"""How long a run that is interrupted waits for its coordinator. One that is started anew on another
machine takes so long; one whose store does not answer would take for ever."""

_FAREWELL_S = 5.0
"""How long workers may take to follow an interruption."""


class Supervisor(SupervisorApi):
    """An async Ray actor, detached and restarted for ever. `SupervisorApi` says what each call
    means.

    Args:
        plan: the run.
    """

    def __init__(self, plan: Kept[RunPlan]) -> None:
        self._plan = plan.value
        self._coordinator = self._plan.job.coordinator
        self._anew, self._interrupted = started_anew(), False
        self._ending: Future[Ending] = Future()
        self._over: asyncio.Future[Ending] | None = None
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    async def about(self) -> About:
        job = self._plan.job
        return About(job=dataclasses.replace(job, task=None), task_info=dict(job.task.info))

    async def coordinator(self) -> Remote[CoordinatorApi]:
        return self._coordinator

    async def going_on(self) -> bool:
        return not self._ending.done()

    async def interrupt(self) -> None:
        if not self._interrupted:
            self._interrupted = True
            what = (self._coordinator, self._plan.prefix)
            threading.Thread(target=end_at_once, args=what, name="interrupt", daemon=True).start()

    async def ending(self, timeout_s: float) -> Ending | None:
        if self._over is None:  # one for all: each adds something to `_ending`
            self._over = asyncio.wrap_future(self._ending)
        await asyncio.wait([self._over], timeout=timeout_s)
        return self._ending.result() if self._ending.done() else None

    # -- threads -----------------------------------------------------------------------------------

    def _run(self) -> None:
        paths = self._plan.job.paths
        try:
            with _hold(paths, anew=self._anew):
                ending = self._supervise(paths)
        except BaseException:
            ending = _own_failure()
        # Whatever fails from here on must keep nobody waiting.
        try:
            end_all(self._plan.prefix)
            # An earlier start may have kept some, with other settings. All who wait for the end
            # wait for the nodes: those of a run that never had any are not asked.
            if end_is_stored(paths, self._plan.job.identity) and (
                self._plan.job.checkpoint.memory_every is not None or has_kept_snapshots(paths)
            ):
                clear_snapshots(paths)
        except Exception:
            log.exception("something of the run is left; its next start clears up")
        self._ending.set_result(ending)
        time.sleep(LINGER_S)
        try:
            conclude(paths)
        except Exception:
            log.exception("the run has no report")
        finally:
            end_own_actor()

    def _supervise(self, paths: RunPaths) -> Ending:
        if self._anew and (ended := _find_end(paths, self._plan.began)) is not None:
            return ending_of(ended)
        drains = DrainWatch(draining_nodes, tell_coordinator(self._coordinator))
        with CoordinatorWatch(self._coordinator), contextlib.closing(drains):
            try:
                ending = self._train()
            except Exception:
                ending = _own_failure()
            outcome: RunOutcome = "failed" if ending.error else "finished"
            if self._interrupted:
                outcome, ending = "interrupted", Ending(error=None, interrupted=True)
            # Watched until it has answered: the call waits for it as long as it lives.
            try:
                self._coordinator.call(CoordinatorApi.end, outcome, ending.error)
            except ray.exceptions.RayActorError:  # gone for good, as after `end_at_once`
                self._record_end(outcome, ending.error)
            except ray.exceptions.RayError as error:
                log.warning("the coordinator has not written the end down: %s", error)
        return ending

    def _record_end(self, outcome: RunOutcome, error: str | None) -> None:
        """In the coordinator's place. That alone knows whether a run that went well was stopped."""
        if outcome == "finished":
            return
        what = (self._plan.job.paths, self._plan.began, outcome, error)
        try:
            asyncio.run(await_closed(ThreadPoolExecutor(1).submit(record_end, *what)))
        except OSError:
            log.exception("the end of the run is in no record")

    def _train(self) -> Ending:
        plan = self._plan
        trainer = ElasticRayTrainer(
            train_worker,
            job=plan.job,
            coordinator=self._coordinator,
            prefix=plan.prefix,
            workers=plan.workers,
            wanted=plan.wanted,
            silent_s=LOCKED_TIMES * plan.job.health.freeze_timeout_s,  # as its node's agent has it
            wait_s=plan.job.scaling.wait_s,
            resources_per_worker=plan.job.scaling.resources_per_worker,
            run_config=plan.run_config,
        )
        try:
            trainer.fit()
        except (TrainingFailedError, TimeoutError, ray.exceptions.RayError) as failure:
            try:
                verdict = self._coordinator.call(CoordinatorApi.verdict)
            except ray.exceptions.RayError as gone:
                again = "run the same name again to continue"
                return Ending(error=f"the coordinator died ({gone}); {again}")
            # A worker lost just before the end is not replaced any more: that is no failure.
            if verdict is not None:
                return Ending(error=verdict.error, cause=verdict.cause)
            again = "run the same name again to continue"
            return Ending(error=f"Ray Train gave up; {again}. It said: {failure}")
        return Ending(error=None)


def _find_end(paths: RunPaths, began: float) -> RunEnded | None:
    """See `find_end`. Where the storage does not answer it is not known, and the coordinator tells
    whoever asks."""
    try:
        return find_end(paths.events, began)
    except OSError as error:
        log.warning("whether the run has ended is not known here: %s", error)
        return None


def _own_failure() -> Ending:
    """For the exception that is being handled."""
    return Ending(error=f"the run's supervisor failed:\n{traceback.format_exc()}")


def end_at_once(coordinator: Remote[CoordinatorApi], prefix: str) -> None:
    """Ends the workers of a run, and their coordinator where that does not answer in `_HEARD_S`.

    Args:
        coordinator: the run's coordinator actor.
        prefix: of the run's names.
    """

    def tell() -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            coordinator.call(CoordinatorApi.fail, "the run was interrupted")

    # First, so that the ends of its workers are no losses.
    telling = threading.Thread(target=tell, name="tell", daemon=True)
    telling.start()
    telling.join(_HEARD_S)
    if telling.is_alive():
        log.warning("the coordinator is ended: it has not answered in %g s", _HEARD_S)
        ray.kill(coordinator.handle)  # the controller waits for its answers, too
    time.sleep(_FAREWELL_S)
    # Whoever still starts, or is in a long step.
    end_actors(WorkerNames(prefix).workers)


@contextlib.contextmanager
def _hold(paths: RunPaths, *, anew: bool) -> Iterator[None]:
    """Holds the lock of the run directory. Whoever has the supervisor's name has the run, so one
    that is started `anew` goes on without the lock where a lost machine still seems to hold it, or
    where the storage is out of reach.

    Raises:
        RunGoesOnError: it is held by somebody else.
    """
    deadline = time.monotonic() + _HANDOVER_S
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(hold_run(paths))
                break
            except (RunGoesOnError, OSError) as error:
                if anew:
                    log.warning("the run goes on without its lock: %s", error)
                    break
                if isinstance(error, OSError) or time.monotonic() > deadline:
                    raise
            time.sleep(_LOCK_RETRY_S)
        yield
