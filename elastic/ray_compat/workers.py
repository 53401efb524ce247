"""A Ray Train worker group whose workers come and go one by one, without anyone waiting for them.

Ray Train's own has one placement group, a fixed number of workers, and blocks while a lost one is
replaced. Here each replica has a placement group of its own, and a thread of its own starts each
worker: actor, train context, callbacks, train function, as Ray Train's worker group does it. What
comes of it is taken in between two polls.

Workers and their placement groups outlive the controller's process. Their names say where each
sits, so the one that is started in its place takes them up as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.execution.context import DistributedContext
from ray.train.v2._internal.execution.worker_group import (
    Worker,
    WorkerGroup,
    WorkerGroupPollStatus,
)
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import RETRY_S, Remote, last_line
from elastic.ray_compat.cluster import (
    actor_class,
    detached,
    draining_nodes,
    find_actor,
    find_node,
    named_actors,
)
from elastic.ray_compat.groups import PlacementGroups
from elastic.ray_compat.placement import (
    MOST_PENDING_GROUPS,
    SILENT_S,
    TOLD_S,
    GroupState,
    GroupView,
    Pauses,
    Seat,
    Silence,
    Wanted,
    plan_group_sizes,
    plan_placement,
)

log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""How long Ray may take for an answer on a busy machine, where workers themselves have less."""
_MOST_S = 600.0
"""One that is not there after this is ended, whatever workers may have: the run waits for it."""
_HIRE_S = 900.0
"""An actor that is not there after this is ended. Ray itself gives what a runtime environment
installs 600 s."""
_LATE_S = 300.0
"""And one of the first ones when so much time has gone by since as many as the run needs have
answered: they wait for it. Its seat is tried again, beside them."""
_MOST_NAMED = 8
"""Workers that a warning names."""
_LOOK_S = 0.5
"""How often a new controller looks which workers have answered."""


@dataclass(kw_only=True)
class SeatedWorker(Worker):
    """A worker that knows where it sits."""

    seat: Seat
    """Group and bundle."""
    launch: int
    """Number of its start; rising."""


class WorkerNames:
    """Names of a run's placement groups and workers on the cluster.

        PREFIXgroup/7d90f2aa    PREFIXworker/7d90f2aa/BUNDLE/LAUNCH

    Args:
        prefix: the run's own.
    """

    def __init__(self, prefix: str) -> None:
        self.groups, self.workers = f"{prefix}group/", f"{prefix}worker/"

    def of(self, seat: Seat, launch: int) -> str:
        """The name of a worker."""
        group, bundle = seat
        return f"{self.workers}{group.removeprefix(self.groups)}/{bundle}/{launch}"

    def parse(self, name: str) -> tuple[Seat, int]:
        """Seat and launch of the worker that has this name."""
        group, bundle, launch = name.removeprefix(self.workers).split("/")
        return (self.groups + group, int(bundle)), int(launch)


class ElasticWorkerGroup(WorkerGroup):
    """Starts and ends workers one by one. All methods but the starting threads' run on the
    controller's event loop."""

    def __init__(
        self, train_run_context: Any, worker_group_context: Any, callbacks: Any = None
    ) -> None:
        # Ours report nothing to Ray Train, and its collector of reports can do neither with no
        # worker (it is what a group is between the loss of all and the first new one) nor with
        # other numbers of them than at the start.
        kept = [c for c in callbacks or () if not isinstance(c, ReportCallbackHandler)]
        super().__init__(train_run_context, worker_group_context, kept)
        self.launches = 0
        """Workers started so far."""
        context = self._worker_group_context
        config: Any = self._train_run_context.backend_config
        self._wanted: Wanted = config.wanted
        self._coordinator: Remote[CoordinatorApi] = config.coordinator
        self._silent_s: float = config.silent_s
        self._names = WorkerNames(config.prefix)
        self._groups = PlacementGroups(
            self._names.groups,
            context.resources_per_worker,
            least=self._wanted.least,
            wait_s=config.wait_s,
            is_over=lambda: self._coordinator.call(CoordinatorApi.verdict) is not None,
        )
        self._ranks: dict[Seat, int] = {}
        self._new_ranks = itertools.count(context.num_workers)
        self._starting: set[Seat] = set()
        self._pauses, self._silence = Pauses(), Silence()
        self._news: queue.SimpleQueue[tuple[Seat, SeatedWorker | Exception]] = queue.SimpleQueue()

    # -- the first workers, all at once ------------------------------------------------------------

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        if self._groups.take_up():
            if self._have_begun():
                self._take_up(worker_group_state_builder)
                return
            self._groups.shutdown()  # they were waited for, and no half of a start is held
        super()._start_impl(worker_group_state_builder)
        # Ray Train's own replacement goes by these, and by its one placement group.
        self._replica_groups = self._worker_rank_to_replica_group_rank = None

    def _have_begun(self) -> bool:
        """Whether workers were started before. A run may have lost all that it had."""
        if named_actors(self._names.workers):
            return True
        return self._coordinator.call(CoordinatorApi.hellos) > 0

    def _take_up(self, builder: Any) -> None:
        """Goes on with the workers that a controller before this one has started."""
        builder.with_placement_group_handle(self._groups)
        sync_actor: Any = SynchronizationActor
        builder.with_sync_actor(sync_actor.remote())  # nobody asks it anything
        builder.with_workers(self._find_workers())
        self._worker_group_state = builder.build()
        seated = self.get_workers()
        self._ranks = {w.seat: w.distributed_context.world_rank for w in seated}
        first = self._worker_group_context.num_workers
        self._new_ranks = itertools.count(
            max([first, *(rank + 1 for rank in self._ranks.values())])
        )
        self.launches = max((worker.launch for worker in seated), default=0)

    def _find_workers(self) -> list[Any]:
        """The workers that were given their train function. One that was still being started is
        ended."""
        found = {name: find_actor(name) for name in named_actors(self._names.workers)}
        actors = {name: actor for name, actor in found.items() if actor is not None}
        workers = []
        for name, answer in ask_all(actors, self._silent_s).items():
            actor = actors[name]
            if isinstance(answer, Exception):
                log.warning("worker %s is ended and replaced, it does not answer: %s", name, answer)
                ray.kill(actor)
                continue
            known, world_rank = answer
            worker = self._seated(actor, known, *self._names.parse(name))
            worker.distributed_context = DistributedContext(
                world_rank=world_rank, world_size=1, local_rank=0, local_world_size=1, node_rank=0
            )
            workers.append(worker)
        return workers

    def _create_placement_group(self, *_: Any) -> Any:
        workers, each = self._worker_group_context.num_workers, self._wanted.workers_per_replica
        replicas = min(self._wanted.replicas, workers // each)
        there = Wanted(
            replicas=replicas, workers_per_replica=each, spares=workers - replicas * each
        )
        for size in plan_group_sizes(there, 0, workers):
            self._groups.ask(size)
        return self._groups

    def _create_workers(self, *_: Any, **__: Any) -> list[Any]:
        seats = [(name, bundle) for name, size in self._groups for bundle in range(size)]
        outcomes = self._hire(seats, self._launch(len(seats)))
        hired: list[Any] = [one for one in outcomes if isinstance(one, SeatedWorker)]
        failed = {
            seat: one
            for seat, one in zip(seats, outcomes, strict=True)
            if isinstance(one, Exception)
        }
        if len(hired) < self._wanted.least:
            for worker in hired:
                ray.kill(worker.actor)
            for failure in failed.values():
                log.warning("%s. %s", failure, failure.__cause__)
            raise self._too_few(hired, list(failed.values()))
        for seat, error in failed.items():  # `settle` has them tried again, as all others
            self._starting.add(seat)
            self._news.put((seat, error))
        self._coordinator.call(CoordinatorApi.expect, len(hired))
        workers: list[Any] = WorkerGroup._assign_worker_ranks(hired, replica_group_size=1)
        self._ranks = {w.seat: w.distributed_context.world_rank for w in workers}
        return workers

    def _too_few(self, hired: list[Any], failures: list[Exception]) -> Exception:
        """Says where the smallest layout lacks workers, and why."""
        named = "; ".join(map(str, failures[:_MOST_NAMED]))
        if len(failures) > _MOST_NAMED:
            named += f"; and {len(failures) - _MOST_NAMED} more"
        return WorkerGroupStartupFailedError(
            f"{len(hired)} of {len(hired) + len(failures)} workers have started, and the smallest "
            f"layout needs {self._wanted.least}: {named}. Mend these machines, or take them out of "
            f"the cluster; the supervisor's log has what Ray said of each"
        )

    # -- workers that come and go ------------------------------------------------------------------

    def get_workers(self) -> list[Any]:
        """See WorkerGroup. They are SeatedWorkers."""
        workers: list[Any] = super().get_workers()
        return workers

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """See WorkerGroup, whose callbacks cannot do with no worker at all."""
        if self.get_workers():
            return super().poll_status(timeout)
        self._latest_poll_status = WorkerGroupPollStatus(worker_statuses={})
        return self._latest_poll_status

    def settle(self) -> list[Exception]:
        """Takes in the workers that have started. Returns why others have not."""
        started: list[SeatedWorker] = []
        failures: list[Exception] = []
        while not self._news.empty():
            seat, outcome = self._news.get()
            self._starting.discard(seat)
            if seat[0] not in self._groups:  # given up meanwhile, and the worker with it
                continue
            if isinstance(outcome, Exception):
                log.warning("a seat is tried again: %s. %s", outcome, outcome.__cause__ or "")
                failures.append(outcome)
                self._pauses.ended(seat, time.monotonic(), there_s=None)
            else:
                started.append(outcome)
        if started:
            self._set_workers([*self.get_workers(), *started])
        return failures

    def silent(self) -> set[int]:
        """Positions of workers that are to be ended, as they do not say hello (`Silence`). Warns of
        those that take long, with their nodes, and has the end of others written down: nobody else
        knows of them."""
        now_s, workers = time.monotonic(), self.get_workers()
        at = {worker.launch: position for position, worker in enumerate(workers)}
        late = self._silence.late(at, now_s)
        if not late:
            return set()
        known = {launch: workers[at[launch]].metadata for launch in late}
        processes = {launch: (one.node_id, one.pid) for launch, one in known.items()}
        try:
            silent = self._coordinator.call(CoordinatorApi.silent, list(processes.values()))
        except ray.exceptions.RayError:  # it has ended for good, and the run with it
            return set()
        if silent is None:
            return set()
        unheard = set(silent)
        quiet = [launch for launch, process in processes.items() if process in unheard]
        told, ended = self._silence.judge(late, quiet, now_s)
        for launches, seconds, what in (
            (told, TOLD_S, f"are ended after {SILENT_S:g} s"),
            (ended, SILENT_S, "are ended now, and replaced"),
        ):
            if launches:
                log.warning(
                    "%d workers have not said hello %g s after they were started, and %s: what "
                    "they import, or their first look at the device, hangs? %s",
                    len(launches),
                    seconds,
                    what,
                    "; ".join(
                        f"process {known[one].pid} on node {known[one].node_id} "
                        f"({known[one].node_ip})"
                        for one in launches[:_MOST_NAMED]
                    ),
                )
        if ended:
            with contextlib.suppress(ray.exceptions.RayError):  # then the run ends
                self._coordinator.call(
                    CoordinatorApi.ended_silent, [processes[launch] for launch in ended], SILENT_S
                )
        return {at[launch] for launch in ended}

    def dismiss(self, ended: list[SeatedWorker], there_s: list[float | None]) -> None:
        """Forgets workers that have ended, and had been there for so long (see `Pauses.ended`);
        their seats are free."""
        for worker, for_s in zip(ended, there_s, strict=True):
            ray.kill(worker.actor)
            self._pauses.ended(worker.seat, time.monotonic(), there_s=for_s)
        gone = {worker.launch for worker in ended}
        self._set_workers([w for w in self.get_workers() if w.launch not in gone])

    def place(self) -> None:
        """Carries out what `plan_placement` decides. Nothing here waits for a machine."""
        draining = frozenset(draining_nodes())
        living: dict[str, dict[int, str]] = {name: {} for name, _ in self._groups}
        for worker in self.get_workers():
            name, bundle = worker.seat
            living[name][bundle] = worker.metadata.node_id
        views = [
            self._view(name, size, living[name], draining) for name, size in list(self._groups)
        ]
        plan = plan_placement(self._wanted, views, MOST_PENDING_GROUPS)
        for name in plan.give_up:
            self._groups.remove(name)
        for size in plan.ask:
            self._groups.ask(size, on_one_node=plan.on_one_node)
        now_s = time.monotonic()
        for seat in plan.fill:
            if self._pauses.over(seat, now_s):
                self._start_in(seat)

    def _view(
        self, name: str, size: int, living: dict[int, str], draining: frozenset[str]
    ) -> GroupView:
        state: GroupState = "placed"
        nodes = living
        if len(living) < size:
            state, nodes = self._groups.look(name)
        return GroupView(
            name=name,
            size=size,
            state=state,
            living=frozenset(living),
            starting=frozenset(bundle for group, bundle in self._starting if group == name),
            draining=frozenset(bundle for bundle, node in nodes.items() if node in draining),
            nodes=nodes if state == "placed" else living,
        )

    def _set_workers(self, workers: list[SeatedWorker]) -> None:
        """Ray Train keeps pending polls by position in this list."""
        old = self.get_workers()
        polls = {old[at].launch: poll for at, poll in self._world_rank_to_ongoing_poll.items()}
        self._world_rank_to_ongoing_poll = {
            at: polls[worker.launch] for at, worker in enumerate(workers) if worker.launch in polls
        }
        old[:] = workers

    # -- starting one ------------------------------------------------------------------------------

    def _start_in(self, seat: Seat) -> None:
        if seat not in self._ranks:
            self._ranks[seat] = next(self._new_ranks)
        self._starting.add(seat)
        what = (seat, self._launch(1))
        threading.Thread(target=self._start_worker, args=what, daemon=True).start()

    def _launch(self, workers: int) -> int:
        """Numbers launches. Returns the first number."""
        self.launches += workers
        return self.launches - workers + 1

    def _start_worker(self, seat: Seat, launch: int) -> None:
        """On a thread of its own: it may take as long as it takes. An actor that is there and
        cannot be given its work is ended: it would hold the seat for good."""
        hired: list[Any] = []
        try:
            (outcome,) = self._hire([seat], launch)
            if isinstance(outcome, Exception):
                raise outcome
            hired.append(outcome)
            workers: list[Any] = WorkerGroup._assign_worker_ranks(
                hired,
                starting_world_rank=self._ranks[seat],
                replica_group_size=1,
            )
            self._init_train_context(workers, self.get_worker_group_state().sync_actor)
            callbacks: list[Any] = self._replica_group_callbacks
            group = ReplicaGroup(workers, self.get_resources_per_worker(), callbacks)
            group.start_training(self._worker_group_context)
        except Exception as error:
            for worker in hired:
                ray.kill(worker.actor)
            self._news.put((seat, error))
        else:
            self._news.put((seat, workers[0]))

    def _seated(self, actor: Any, known: Any, seat: Seat, launch: int) -> SeatedWorker:
        return SeatedWorker(
            actor=actor,
            metadata=known,
            resources=self.get_resources_per_worker(),
            placement_group_bundle_index=seat[1],
            seat=seat,
            launch=launch,
        )

    def _hire(self, seats: list[Seat], first_launch: int) -> list[SeatedWorker | Exception]:
        """Starts an actor in each seat and waits for them, for `_HIRE_S` and `_LATE_S` at most.
        Returns what came of each: a worker, or why there is none; its actor is ended then."""
        resources = self.get_resources_per_worker()
        own: Any = self._train_run_context.run_config.worker_runtime_env
        environment = self._get_worker_runtime_env(own)
        options: dict[str, Any] = {**bundle_to_remote_args(resources), "runtime_env": environment}
        actors = [
            actor_class(self._worker_cls)
            .options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._groups[seat[0]], placement_group_bundle_index=seat[1]
                ),
                **detached(self._names.of(seat, first_launch + i)),
            )
            .remote()
            for i, seat in enumerate(seats)
        ]
        calls = [actor.get_metadata.remote() for actor in actors]
        begun_s = time.monotonic()
        late = _await_least(calls, min(self._wanted.least, len(calls)), begun_s + _HIRE_S)
        if late:
            ray.wait(late, num_returns=len(late), timeout=_LATE_S)
        waited_s = time.monotonic() - begun_s
        outcomes: list[SeatedWorker | Exception] = []
        for launch, (actor, call, seat) in enumerate(
            zip(actors, calls, seats, strict=True), first_launch
        ):
            try:
                outcomes.append(self._seated(actor, ray.get(call, timeout=0), seat, launch))
            except ray.exceptions.RayError as error:
                ray.kill(actor)
                outcomes.append(self._not_hired(seat, error, waited_s))
        return outcomes

    def _not_hired(self, seat: Seat, error: ray.exceptions.RayError, waited_s: float) -> Exception:
        """Says where no worker has started, and why; its cause has all that Ray says."""
        late = isinstance(error, ray.exceptions.GetTimeoutError)
        fact = f"it was not there after {waited_s:.1f} s" if late else last_line(error)
        group, bundle = seat
        node = self._groups.look(group)[1].get(bundle)
        found = None if node is None else find_node(node)
        where = f"node {node} ({found.address})" if found is not None else f"node {node}"
        failure = WorkerGroupStartupFailedError(f"a worker did not start on {where}: {fact}")
        failure.__cause__ = error
        return failure


def _await_least(calls: list[Any], least: int, deadline: float) -> list[Any]:
    """Waits until so many workers are there, or too many have failed. Returns the calls that have
    no answer yet; none where the least are not there."""
    left, good = calls, 0
    while 0 < least - good <= len(left) and (for_s := deadline - time.monotonic()) > 0:
        answered, left = ray.wait(left, num_returns=least - good, timeout=for_s)
        good += sum(map(_is_there, answered))
    return left if good >= least else []


def _is_there(call: Any) -> bool:
    try:
        ray.get(call, timeout=0)
    except ray.exceptions.RayError:
        return False
    return True


def _world_rank() -> int:
    """Called in a worker; raises where it has no train context yet."""
    return int(ray.train.get_context().get_world_rank())


def ask_all(actors: Mapping[str, Any], silent_s: float) -> dict[str, Any]:
    """Asks workers what a new controller must know of them. A connection that was reset ends none
    (see `find_at_work`): it is asked again.

    Args:
        actors: name -> Ray's handle.
        silent_s: one that is healthy may be silent for so long.

    Returns:
        name -> its metadata and world rank, or the error that was the answer.
    """
    deadline = time.monotonic() + min(max(silent_s, _ANSWER_S), _MOST_S)
    asked = {name: _ask(actor) for name, actor in actors.items()}
    answers: dict[str, Any] = {}
    while asked:
        late = time.monotonic() >= deadline
        calls = [call for two in asked.values() for call in two]
        ray.wait(calls, num_returns=len(calls), timeout=_LOOK_S)
        for name, two in list(asked.items()):
            try:
                answers[name] = ray.get(two, timeout=0)
            except (ray.exceptions.RayError, TimeoutError) as error:
                if not late and isinstance(error, TimeoutError):
                    continue
                if not late and isinstance(error, ray.exceptions.ActorUnavailableError):
                    asked[name] = _ask(actors[name])
                    continue
                answers[name] = error
            del asked[name]
        if asked:
            time.sleep(RETRY_S)  # who is unreachable fails at once
    return {name: answers[name] for name in actors}


def _ask(actor: Any) -> list[Any]:
    return [actor.get_metadata.remote(), actor.execute.remote(_world_rank)]
