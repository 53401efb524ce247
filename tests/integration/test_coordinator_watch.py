"""The driver's watch: a process whose event loop is stuck is killed, one that is busy is not."""

from __future__ import annotations

from typing import cast

import pytest
import ray

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote
from elastic.ray_compat.cluster import start_actor
from elastic.supervisor.coordinator_watch import CoordinatorWatch
from health import questions
from tests.support.stuck_coordinator import Loop
from tests.support.watching import wait_until

ANSWER_S = 0.6


def test_a_coordinator_whose_event_loop_is_stuck_is_killed_one_that_is_busy_is_not(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", ANSWER_S)
    actor = start_actor(Loop, max_concurrency=10, restarts=True)()
    first = ray.get(actor.send(Loop.pid))
    with CoordinatorWatch(cast(Remote[CoordinatorApi], actor)):
        for _ in range(3):
            ray.get(actor.send(Loop.compute, 2 * ANSWER_S))
        assert ray.get(actor.send(Loop.pid)) == first
        hung = actor.send(Loop.hang)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(hung, timeout=60)

        def another() -> bool:
            try:
                return ray.get(actor.send(Loop.pid)) != first
            except ray.exceptions.ActorUnavailableError:
                return False

        wait_until(another)
    ray.kill(actor.handle)
