"""Everything that leans on Ray's internals, in one place. Checked on Ray 2.60.

- `ElasticBackendConfig` makes Ray Train's controller treat each worker as its own replica group:
  when one dies it
  starts a new actor in the same bundle and leaves the others running.
- `ElasticRayTrainer` puts our failure policy where `DataParallelTrainer.fit` would make its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray
from ray.train import Result, RunConfig
from ray.train import ScalingConfig as RayScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

POLL_INTERVAL_VARIABLE = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
POLL_INTERVAL_S = "0.5"


class _ElasticBackend(Backend):
    """Sets nothing up: process groups are ours, per replica and generation."""

    has_replica_groups = True


class ElasticBackendConfig(BackendConfig):
    """Ray Train replaces single workers and leaves the rest running."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend that the controller asks."""
        return _ElasticBackend


class CoordinatorDecides(FailurePolicy):
    """Every lost worker is replaced until the coordinator says that the run is over."""

    def __init__(self, coordinator: Any) -> None:
        super().__init__(FailureConfig(max_failures=-1))
        self._coordinator = coordinator

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """See FailurePolicy."""
        try:
            verdict = ray.get(self._coordinator.verdict.remote())
        except ray.exceptions.RayError:
            return FailureDecision.RAISE
        if verdict is not None and verdict.error is not None:
            return FailureDecision.RAISE
        return FailureDecision.RETRY


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
        before = os.environ.get(POLL_INTERVAL_VARIABLE)
        os.environ.setdefault(POLL_INTERVAL_VARIABLE, POLL_INTERVAL_S)
        try:
            return super()._initialize_and_run_controller(**arguments)
        finally:
            if before is None:
                del os.environ[POLL_INTERVAL_VARIABLE]


def start_coordinator(config: Any) -> Any:
    """Starts the run's coordinator on the driver's node. Every worker has calls pending in it."""
    from elastic.coordinator import Coordinator

    here = ray.get_runtime_context().get_node_id()
    return _actor_on(here, Coordinator, max_concurrency=100_000).remote(config)


def start_node_agent(node: str) -> Any:
    """Starts a node agent on `node`; called by the coordinator, which owns it."""
    from elastic.node_agent import NodeAgent

    coordinator = ray.get_runtime_context().current_actor
    return _actor_on(node, NodeAgent, max_concurrency=8).remote(coordinator)


def host_store() -> tuple[str, int, Any]:
    """Hosts a TCPStore here. Returns the address, the port, and what keeps it alive."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return ray.util.get_node_ip_address(), store.port, store


def _actor_on(node: str, cls: type, *, max_concurrency: int) -> Any:
    """An actor class that takes no CPU slot and lives on `node`."""
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": max_concurrency}
    return ray.remote(**options)(cls).options(scheduling_strategy=place)
