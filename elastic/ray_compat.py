"""Everything that leans on Ray's internals, in one place. Checked on Ray 2.60.

- `ElasticBackendConfig` makes Ray Train's controller treat each worker as its own replica group:
  when one dies it
  starts a new actor in the same bundle and leaves the others running.
- `ElasticController` replaces several lost workers at once. The stock one, on 2.60, asks all
  workers it believes
  alive to clear a queue first; one more dead worker among them sends it into an endless loop over
  the same error.
- `ElasticRayTrainer` puts our controller and failure policy where `DataParallelTrainer` would make
  its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.train import Result, RunConfig
from ray.train import ScalingConfig as RayScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

log = logging.getLogger(__name__)

POLL_OFTEN = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""Unless the user says otherwise. A poll costs one small call a worker, off the step path."""


END_PATIENCE_S = 60.0
"""How long the controller may take to notice that the run is over."""

MOST_FUTILE_RETRIES = 5
"""Retries with no worker started in between that end a run: nothing is going to start."""


class _ElasticBackend(Backend):
    """Sets nothing up: process groups are ours, per replica and generation."""

    has_replica_groups = True


class ElasticBackendConfig(BackendConfig):
    """Ray Train replaces single workers and leaves the rest running."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend that the controller asks."""
        return _ElasticBackend


class ElasticController(TrainController):
    """Ray Train's controller, able to replace workers while others die."""

    def _replace_bad_workers(self, poll_status: Any) -> None:
        group: Any = self._worker_group
        failing = sorted(poll_status.failing_replica_group_indices)
        for index in failing:  # from here on none of them counts as active
            group.get_replica_groups()[index].shutdown()
        for index in failing:
            try:
                group.replace_replica_group(index)
            except (ray.exceptions.RayActorError, WorkerGroupStartupFailedError) as error:
                log.warning("worker %d is replaced after the next poll: %s", index, error)


class CoordinatorDecides(FailurePolicy):
    """Every lost worker is replaced, until the coordinator says that the run is over."""

    def __init__(self, coordinator: Any) -> None:
        super().__init__(FailureConfig(max_failures=-1))
        self._coordinator = coordinator
        self._hellos = self._futile = 0

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """See FailurePolicy."""
        try:
            verdict = ray.get(self._coordinator.verdict.remote())
            hellos = ray.get(self._coordinator.hellos.remote())
        except ray.exceptions.RayError:
            return FailureDecision.RAISE
        self._futile = self._futile + 1 if hellos == self._hellos else 0
        self._hellos = hellos
        over = verdict is not None or self._futile >= MOST_FUTILE_RETRIES
        return FailureDecision.RAISE if over else FailureDecision.RETRY


class ElasticRayTrainer(DataParallelTrainer):
    """Places the workers and keeps them alive; what they do is `train_worker`'s affair.

    Args:
        train_worker: the train function, called with `{"job": job}`.
        job: what every worker gets.
        coordinator: the run's coordinator actor.
        workers: how many, spares included.
        resources_per_worker: what Ray reserves for each.
        run_config: the user's, with Ray Train's own meaning.
    """

    def __init__(
        self,
        train_worker: Callable[[dict[str, Any]], None],
        *,
        job: Any,
        coordinator: Any,
        workers: int,
        resources_per_worker: dict[str, float],
        run_config: RunConfig,
    ) -> None:
        self._coordinator = coordinator
        super().__init__(
            train_worker,
            train_loop_config={"job": job},
            backend_config=ElasticBackendConfig(),
            scaling_config=RayScalingConfig(
                num_workers=workers,
                use_gpu="GPU" in resources_per_worker,
                resources_per_worker=resources_per_worker,
            ),
            run_config=run_config,
        )

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        arguments["failure_policy"] = CoordinatorDecides(self._coordinator)
        variables = {**POLL_OFTEN, **get_env_vars_to_propagate()}
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
        here = _on_node(ray.get_runtime_context().get_node_id())
        actor: Any = ray.remote(**options)(ElasticController)
        controller: Any = actor.options(scheduling_strategy=here).remote(**arguments)
        if threading.current_thread() is threading.main_thread():
            self._register_sigint_handler(controller)
        running, over = controller.run.remote(), self._coordinator.over.remote()
        ray.wait([running, over], num_returns=1)
        # The controller may be stuck in the replacement of a worker whose node is gone for good.
        if not ray.wait([running], timeout=END_PATIENCE_S)[0]:
            ray.kill(controller)
        ray.get(running)
        result: Result = ray.get(controller.get_result.remote())
        return result


def start_actor(cls: type, *args: Any, node: str | None = None, max_concurrency: int) -> Any:
    """Starts an actor that takes no CPU slot, on `node` (Ray's id) or on this process's own.

    Args:
        cls: the actor's class.
        args: for its constructor.
        node: where it lives; it never moves.
        max_concurrency: calls that may be pending in it.
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": max_concurrency}
    place = _on_node(node or ray.get_runtime_context().get_node_id())
    return ray.remote(**options)(cls).options(scheduling_strategy=place).remote(*args)


def live_nodes() -> list[str]:
    """Ray's ids of the nodes that it believes alive."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def on_every_node(function: Callable[..., Any], *args: Any, timeout_s: float) -> dict[str, Any]:
    """Calls `function(*args, node)` on each live node, in a process of that node.

    Returns:
        What each node answered; nodes that failed or took longer than `timeout_s` are left out.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = {
        task.options(scheduling_strategy=_on_node(node)).remote(*args, node): node
        for node in live_nodes()
    }
    done, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    answers = {}
    for call in done:
        try:
            answers[calls[call]] = ray.get(call)
        except ray.exceptions.RayError as error:
            log.warning("%s on node %s: %s", function.__name__, calls[call], error)
    for call in late:
        log.warning("%s on node %s: no answer in %g s", function.__name__, calls[call], timeout_s)
    return answers


def available_per_node() -> list[dict[str, float]]:
    """The free resources of each live node."""
    return list(available_resources_per_node().values())


def host_store() -> tuple[str, int, Any]:
    """Hosts a TCPStore here. Returns the address, the port, and what keeps it alive."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return ray.util.get_node_ip_address(), store.port, store


def _on_node(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)
