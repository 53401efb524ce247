"""Actors in place of those of a run, for tests of its end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import warnings
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from elastic.protocol.causes import USER_ERROR
from elastic.protocol.events import RunOutcome
from elastic.protocol.job import Job
from elastic.protocol.rpc import Remote
from elastic.protocol.supervisor_api import About, Ending
from elastic.ray_compat.cluster import end_own_actor, named_actors, started_anew
from elastic.ray_compat.groups import end_all


class Ended:
    """Stands for the supervisor of a run that has ended."""

    def __init__(self, error: str | None) -> None:
        self.error = error

    async def ending(self, timeout_s: float) -> Ending:
        return Ending(error=self.error, cause=None if self.error is None else USER_ERROR)

    async def going_on(self) -> bool:
        return False


class GoingOn(Ended):
    """One whose run goes on until it is interrupted."""

    async def going_on(self) -> bool:
        return True

    async def interrupt(self) -> None:
        if self.error is None:  # the run has ended by itself a moment ago
            os._exit(0)


class Interrupted(Remote[Any]):
    """A supervisor's handle; whoever waits for the ending is interrupted once."""

    interrupted = False

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return super().call(method, *args, **kwargs)


class Broken(Ended):
    """One that answers with an error."""

    async def going_on(self) -> bool:
        raise RuntimeError("its disk is full")


class OfRun(GoingOn):
    """Stands for the supervisor of a run that goes on, and that others attach to.

    Args:
        job: the run's.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(None)
        self.job = job

    async def about(self) -> About:
        return About(job=self.job, task_info={})


class Deaf:
    """Stands for a coordinator that waits for its store."""

    async def fail(self, error: str) -> None:
        await asyncio.Event().wait()


class Told:
    """Stands for a coordinator that writes down how the run has ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[RunOutcome, str | None]] = []

    async def awake(self) -> None:
        """What the supervisor's watch asks."""

    async def end(self, outcome: RunOutcome, error: str | None) -> None:
        self.ends.append((outcome, error))

    async def all_ends(self) -> list[tuple[RunOutcome, str | None]]:
        return self.ends


class StuckAtTheEnd(Told):
    """One whose event loop hangs as it writes that down; the one that is started anew is well."""

    async def end(self, outcome: RunOutcome, error: str | None) -> None:
        if not started_anew():
            threading.Event().wait()
        await super().end(outcome, error)


class Supervised:
    """Does what Ray has warned of in a supervisor, which is an async actor."""

    async def pid(self) -> int:
        return os.getpid()

    async def warned_of(self) -> tuple[bool, list[str]]:
        """Whether it was started anew, and Ray's warnings."""
        told: list[str] = []
        listener = logging.Handler()
        listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ray").addHandler(listener)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            anew = started_anew()
            await asyncio.to_thread(lambda: ray.get(ray.put(1)))
        return anew, told + [str(one.message) for one in caught]


class StandingWorker:
    """Stands for one that is in a long step."""

    async def pid(self) -> int:
        return os.getpid()


class Cleaner:
    """Clears up after a run that it is itself an actor of, as the coordinator does."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def clear_up(self) -> None:
        end_all(self.prefix)

    def what_is_left(self) -> list[str]:
        groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
        return [*named_actors(self.prefix), *(g for g in groups if g.startswith(self.prefix))]

    def leave(self) -> None:
        end_own_actor()
