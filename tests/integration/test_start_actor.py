"""How the control plane starts its actors."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray
from ray._private import worker

from elastic.ray_compat.cluster import end_actors, export_actors, start_actor
from elastic.ray_compat.trainer import controller_variables
from tests.support.run_end import Supervised
from tests.support.stuck_coordinator import Loop


def test_a_class_is_told_to_ray_once_and_its_actors_start_without_the_head(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator starts them on its event loop, and must not wait for a head that is away."""
    export_actors(Loop)

    def refuse(*_: Any) -> None:
        raise ConnectionError("the head is away")

    told: Any = worker.global_worker
    monkeypatch.setattr(told.function_actor_manager, "export_actor_class", refuse)
    export_actors(Loop)
    actors = [start_actor(Loop, max_concurrency=10)() for _ in range(2)]
    assert len({ray.get(actor.send(Loop.pid)) for actor in actors}) == 2
    for actor in actors:
        ray.kill(actor.handle)


def test_a_supervisor_learns_that_it_was_started_anew_and_ray_warns_of_nothing(
    cluster: None,
) -> None:
    """What actors write is on the console of a user who has not called `ray.init`."""
    actor = start_actor(
        Supervised,
        max_concurrency=10,
        restarts=True,
        name="test/supervised",
        variables=controller_variables(),
    )()
    assert actor.call(Supervised.warned_of) == (False, [])
    os.kill(actor.call(Supervised.pid), signal.SIGKILL)
    assert actor.call(Supervised.warned_of) == (True, [])
    end_actors("test/supervised")
