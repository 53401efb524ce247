"""Ray Train's trainer, with our controller and failure policy in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.train import Result, RunConfig
from ray.train import ScalingConfig as RayScalingConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import RETRY_S, Remote, restarting
from elastic.ray_compat.cluster import on_node
from elastic.ray_compat.controller import (
    CoordinatorDecides,
    ElasticBackendConfig,
    ElasticController,
)
from elastic.ray_compat.groups import remove_groups
from elastic.ray_compat.placement import Wanted

POLL_OFTEN = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""Unless the user says otherwise. A poll costs one small call a worker, off the step path."""

END_PATIENCE_S = 60.0
"""How long the controller may take to notice that the run is over: the last net."""


class ElasticRayTrainer(DataParallelTrainer):
    """Places the workers and keeps them alive; what they do is `train_worker`'s affair.

    Args:
        train_worker: the train function, called with `{"job": job}`.
        job: what every worker gets.
        coordinator: the run's coordinator actor.
        workers: how many to start with, spares included.
        wanted: how many there are when all machines are there.
        resources_per_worker: what Ray reserves for each.
        run_config: the user's, with Ray Train's own meaning.
    """

    def __init__(
        self,
        train_worker: Callable[[dict[str, Any]], None],
        *,
        job: Any,
        coordinator: Remote[CoordinatorApi],
        workers: int,
        wanted: Wanted,
        resources_per_worker: dict[str, float],
        run_config: RunConfig,
    ) -> None:
        self._coordinator = coordinator
        super().__init__(
            train_worker,
            train_loop_config={"job": job},
            backend_config=ElasticBackendConfig(wanted, coordinator),
            scaling_config=RayScalingConfig(
                num_workers=workers,
                use_gpu="GPU" in resources_per_worker,
                resources_per_worker=resources_per_worker,
            ),
            run_config=run_config,
        )

    def _create_default_callbacks(self) -> list[Any]:
        """Without two of Ray Train's own: the detached cleaner knows of one placement group only,
        and the callback for Ray Datasets, which a run has none of, starts an actor for every worker
        that is started, seconds of a core each."""
        unwanted = (PlacementGroupCleanerCallback, DatasetsCallback)
        return [c for c in super()._create_default_callbacks() if not isinstance(c, unwanted)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        arguments["failure_policy"] = CoordinatorDecides(self._coordinator)
        variables = {**POLL_OFTEN, **get_env_vars_to_propagate()}
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
        here = on_node(ray.get_runtime_context().get_node_id())
        actor: Any = ray.remote(**options)(ElasticController)
        controller: Any = actor.options(scheduling_strategy=here).remote(**arguments)
        try:
            return self._wait_for(controller)
        except (KeyboardInterrupt, SystemExit):
            # First, so that the ends of its workers are no losses.
            self._coordinator.call(CoordinatorApi.fail, "the run was interrupted")
            raise
        finally:
            ray.kill(controller)
            # A controller that was killed left them, and one that was interrupted may have.
            remove_groups(self.train_run_context.run_id)

    def _wait_for(self, controller: Any) -> Result:
        running, over = controller.run.remote(), self._coordinator.send(CoordinatorApi.over)
        while over in ray.wait([running, over], num_returns=1)[0] and restarting(over):
            time.sleep(RETRY_S)
            over = self._coordinator.send(CoordinatorApi.over)
        if not ray.wait([running], timeout=END_PATIENCE_S)[0]:
            ray.kill(controller)
        ray.get(running)
        result: Result = ray.get(controller.get_result.remote())
        return result
