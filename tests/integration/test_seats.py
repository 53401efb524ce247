"""A seat whose worker could not be given its work is free for another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastic.protocol.rpc import Remote
from elastic.ray_compat.cluster import named_actors
from elastic.ray_compat.controller import ElasticBackendConfig
from elastic.ray_compat.groups import end_all
from elastic.ray_compat.placement import Wanted
from elastic.ray_compat.workers import ElasticWorkerGroup
from tests.support.watching import wait_until

PREFIX = "seats/"


def group_of_one() -> ElasticWorkerGroup:
    """Of a controller that is no actor: a worker cannot be told of it."""
    wanted = Wanted(replicas=1, workers_per_replica=1, spares=0)
    run = SimpleNamespace(storage_context=None, worker_runtime_env={})
    group = ElasticWorkerGroup(
        SimpleNamespace(
            run_config=run,
            backend_config=ElasticBackendConfig(
                wanted, Remote(None), PREFIX, silent_s=30.0, wait_s=30.0
            ),
        ),
        SimpleNamespace(num_workers=1, resources_per_worker={"CPU": 1}),
    )
    started: Any = SimpleNamespace(workers=[], sync_actor=None)
    group._worker_group_state = started
    return group


def test_an_actor_that_cannot_be_given_its_work_is_ended(cluster: None) -> None:
    group = group_of_one()
    failures: list[Exception] = []

    def begins() -> bool:
        group.place()
        return group.launches > 0

    def settles() -> bool:
        failures.extend(group.settle())
        return bool(failures)

    try:
        wait_until(begins)
        wait_until(settles)
        assert "only available in an actor" in str(failures[0]), "its actor had answered"
        wait_until(lambda: not named_actors(PREFIX))
    finally:
        end_all(PREFIX)
