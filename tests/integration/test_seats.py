"""A seat whose worker did not start, or could not be given its work, is free for another one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote
from elastic.ray_compat import workers as module
from elastic.ray_compat.cluster import live_nodes, named_actors
from elastic.ray_compat.controller import ElasticBackendConfig
from elastic.ray_compat.groups import end_all
from elastic.ray_compat.placement import Wanted
from elastic.ray_compat.workers import ElasticWorkerGroup
from tests.support.failing_workers import SecondFails, SecondFailsThirdIsSlow, SecondHangs
from tests.support.watching import wait_until

PREFIX = "seats/"


class Expecting:
    """A coordinator of a run that goes on."""

    def __init__(self) -> None:
        self.workers: list[int] = []

    def call(self, method: object, *workers: int) -> None:
        assert method in (CoordinatorApi.expect, CoordinatorApi.verdict)
        self.workers.extend(workers)


def group_of(workers: int, *, least: int = 1) -> ElasticWorkerGroup:
    """Of a controller that is no actor: a worker cannot be told of it."""
    wanted = Wanted(replicas=workers, workers_per_replica=1, spares=0, min_replicas=least)
    run = SimpleNamespace(storage_context=None, worker_runtime_env={})
    group = ElasticWorkerGroup(
        SimpleNamespace(
            run_config=run,
            backend_config=ElasticBackendConfig(
                wanted, Remote(None), PREFIX, silent_s=30.0, wait_s=30.0
            ),
        ),
        SimpleNamespace(num_workers=workers, resources_per_worker={"CPU": 1}),
    )
    started: Any = SimpleNamespace(workers=[], sync_actor=None)
    group._worker_group_state = started
    return group


@pytest.fixture
def seats(cluster: None) -> Iterator[None]:
    yield
    end_all(PREFIX)


def first_workers(group: ElasticWorkerGroup, worker: type[RayTrainWorker]) -> list[Any]:
    """Those that a start gets, of that class."""
    coordinator: Any = Expecting()
    group._coordinator, group._worker_cls = coordinator, worker
    assert group._create_placement_group().wait(60.0)
    started = group._create_workers()
    assert coordinator.workers == [len(started)], "no others are waited for"
    return started


def test_an_actor_that_cannot_be_given_its_work_is_ended(seats: None) -> None:
    group = group_of(1)
    failures: list[Exception] = []

    def begins() -> bool:
        group.place()
        return group.launches > 0

    def settles() -> bool:
        failures.extend(group.settle())
        return bool(failures)

    wait_until(begins)
    wait_until(settles)
    assert "only available in an actor" in str(failures[0]), "its actor had answered"
    wait_until(lambda: not named_actors(PREFIX))


def test_a_run_starts_without_a_worker_that_does_not_start_and_tries_its_seat_again(
    seats: None,
) -> None:
    group = group_of(3)
    started = first_workers(group, SecondFails)
    assert sorted(one.launch for one in started) == [1, 3]
    assert sorted(one.distributed_context.world_rank for one in started) == [0, 1]
    group.get_workers().extend(started)
    wait_until(lambda: len(named_actors(PREFIX)) == 2)
    group.place()
    assert group.launches == 3, "what has failed is looked at before"
    (failure,) = group.settle()
    (node,) = live_nodes()
    assert f"on node {node} (" in str(failure) and "no space left" in str(failure)
    group.place()
    assert group.launches == 4
    wait_until(group.settle)


def test_a_start_with_too_few_workers_names_machines_and_causes(
    seats: None, caplog: pytest.LogCaptureFixture
) -> None:
    told = r"2 of 3 workers have started, and .* needs 3: a worker did not start .*no space left"
    with caplog.at_level(logging.WARNING), pytest.raises(WorkerGroupStartupFailedError, match=told):
        first_workers(group_of(3, least=3), SecondFails)
    assert "OSError: no space left on device" in caplog.text
    wait_until(lambda: not named_actors(PREFIX))


def test_a_worker_that_is_never_there_is_ended(
    seats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HIRE_S", 0.5)
    told = r"[01] of 2 workers have started.* it was not there after \d+\.\d s"
    with pytest.raises(WorkerGroupStartupFailedError, match=told):
        first_workers(group_of(2, least=2), SecondHangs)
    wait_until(lambda: not named_actors(PREFIX))


def test_one_that_has_failed_is_none_of_the_least(
    seats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the one that is slow are; the slow one has all the time."""
    monkeypatch.setattr(module, "_LATE_S", 0.0)
    started = first_workers(group_of(3, least=2), SecondFailsThirdIsSlow)
    assert sorted(one.launch for one in started) == [1, 3]


def test_a_start_waits_no_longer_for_the_rest_once_it_has_enough(
    seats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LATE_S", 0.1)
    group = group_of(2)
    (first,) = first_workers(group, SecondHangs)
    assert first.launch == 1
    (failure,) = group.settle()
    assert "it was not there after" in str(failure)
