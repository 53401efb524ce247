"""Ray Train's trainer, with our controller and failure policy in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
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
from elastic.protocol.rpc import Remote, restarting
from elastic.ray_compat.controller import (
    CoordinatorDecides,
    ElasticBackendConfig,
    ElasticController,
)
from elastic.ray_compat.placement import Wanted

_POLL_OFTEN = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""Unless the user says otherwise. A poll costs one small call a worker, off the step path."""

_WAITS_ON_A_THREAD = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
"""Ray warns of a `ray.get` in any thread of an async actor; the controller has one of its own, and
blocks no event loop."""

END_PATIENCE_S = 60.0
"""How long the controller may take to notice that the run is over: the last net."""

_LOOK_S = 0.5
"""How often it is looked whether the run is over."""


def controller_variables() -> dict[str, str]:
    """What the environment of the process with the controller must hold, by this process's own."""
    return {**_POLL_OFTEN, **_WAITS_ON_A_THREAD, **get_env_vars_to_propagate()}


class ElasticRayTrainer(DataParallelTrainer):
    """Places the workers and keeps them alive; what they do is `train_worker`'s affair.

    Args:
        train_worker: the train function, called with `{"job": job}`.
        job: what every worker gets.
        coordinator: the run's coordinator actor.
        prefix: the names of the run's actors and placement groups begin with it.
        workers: how many to start with, spares included.
        wanted: how many there are when all machines are there.
        silent_s: for so long a healthy worker may answer no call.
        wait_s: how long the start waits for the resources of the smallest layout.
        resources_per_worker: what Ray reserves for each.
        run_config: the user's, with Ray Train's own meaning.
    """

    def __init__(
        self,
        train_worker: Callable[[dict[str, Any]], None],
        *,
        job: Any,
        coordinator: Remote[CoordinatorApi],
        prefix: str,
        workers: int,
        wanted: Wanted,
        silent_s: float,
        wait_s: float,
        resources_per_worker: dict[str, float],
        run_config: RunConfig,
    ) -> None:
        self._coordinator = coordinator
        super().__init__(
            train_worker,
            train_loop_config={"job": job},
            backend_config=ElasticBackendConfig(
                wanted, coordinator, prefix, silent_s=silent_s, wait_s=wait_s
            ),
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
        """In this process, on a thread of its own: the run's supervisor is the actor that Ray Train
        would make for it."""
        arguments["failure_policy"] = CoordinatorDecides(self._coordinator)
        controller: Any = ElasticController(**arguments)
        ended: Future[None] = Future()

        def control() -> None:
            try:
                asyncio.run(controller.run())
                ended.set_result(None)
            except BaseException as error:
                ended.set_exception(error)

        threading.Thread(target=control, name="controller", daemon=True).start()
        self._await(ended)
        result: Result = controller.get_result()
        return result

    def _await(self, ended: Future[None]) -> None:
        """Waits for the controller.

        Raises:
            TimeoutError: the run is over, and it does not notice.
        """
        over = self._coordinator.send(CoordinatorApi.over)
        while not wait([ended], _LOOK_S).done:
            if not ray.wait([over], timeout=0)[0]:
                continue
            if not restarting(over):
                if not wait([ended], END_PATIENCE_S).done:
                    raise TimeoutError(
                        f"the run is over; Ray Train has not ended in {END_PATIENCE_S:g} s"
                    )
                break
            over = self._coordinator.send(CoordinatorApi.over)
        ended.result()
