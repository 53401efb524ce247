"""What ends a run whose first workers do not start."""

from __future__ import annotations

from typing import Any

from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision

from elastic.errors import ResourcesError
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.ray_compat.controller import MOST_FUTILE_STARTS, CoordinatorDecides


class NobodyHasCome:
    """A coordinator."""

    def call(self, method: Any) -> int | None:
        return {CoordinatorApi.verdict: None, CoordinatorApi.hellos: 0}[method]


def decisions(failure: Exception, times: int) -> list[FailureDecision]:
    coordinator: Any = NobodyHasCome()
    policy = CoordinatorDecides(coordinator)
    return [policy.make_decision(ControllerError(failure)) for _ in range(times)]


def test_workers_that_do_not_start_are_tried_some_times() -> None:
    failed = decisions(WorkerGroupStartupFailedError("a disk is full"), MOST_FUTILE_STARTS)
    assert failed == [FailureDecision.RETRY] * 4 + [FailureDecision.RAISE]


def test_want_of_room_was_waited_for_and_is_not_tried_again() -> None:
    lacking = ResourcesError("2 workers with 1 CPU each", "others have it", 60.0, "Add nodes")
    assert decisions(lacking, 1) == [FailureDecision.RAISE]
