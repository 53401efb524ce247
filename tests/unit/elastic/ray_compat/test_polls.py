"""Which workers have ended, by what Ray Train's poll says of them."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.train.v2._internal.exceptions import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.worker_group import WorkerStatus

from elastic.ray_compat.controller import find_at_work


def failed(failure: Exception) -> WorkerStatus:
    """As the poll tells of a call that has failed with `failure`."""
    return WorkerStatus(
        running=False, error=WorkerHealthCheckFailedError("a health check failed", failure)
    )


def test_a_reset_connection_ends_no_worker() -> None:
    well = WorkerStatus(running=True)
    reset = failed(ActorUnavailableError("RPC error: Socket closed", None))
    assert find_at_work({0: well, 1: reset}) == {0: well, 1: well}


@pytest.mark.parametrize(
    "status",
    [
        failed(ActorDiedError()),
        failed(RuntimeError("raised in the poll")),
        WorkerStatus(running=True, error=WorkerHealthCheckTimeoutError("no answer")),
        WorkerStatus(running=False),
        WorkerStatus(running=False, error=RuntimeError("raised in the train function")),
    ],
)
def test_a_worker_that_has_ended_is_known_at_once(status: WorkerStatus) -> None:
    assert find_at_work({0: status}) == {}
