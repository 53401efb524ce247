"""Ray Train's workers, of which some do not start."""

from __future__ import annotations

import threading
import time

import ray
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker


def _launch() -> int:
    """Of the actor that this is, by its name (`WorkerNames`)."""
    return int(str(ray.get_runtime_context().get_actor_name()).rpartition("/")[2])


class SecondFails(RayTrainWorker):
    """The disk of the second one's machine is full."""

    def __init__(self) -> None:
        if _launch() == 2:
            raise OSError("no space left on device")
        super().__init__()


class SecondHangs(RayTrainWorker):
    """The second one is never there."""

    def __init__(self) -> None:
        if _launch() == 2:
            threading.Event().wait()
        super().__init__()


class SecondFailsThirdIsSlow(SecondFails):
    """The third one is there once the second one has failed, and all have been waited for."""

    def __init__(self) -> None:
        if _launch() == 3:
            time.sleep(2.0)
        super().__init__()
