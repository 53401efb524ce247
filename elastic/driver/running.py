"""A run that is going on: how a driver finds it, follows it to its end, and stops it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import ray

from checkpointing import CheckpointConfig
from checkpointing.field_types import type_name
from elastic.config import HealthConfig, ScalingConfig
from elastic.driver.observer import Observer
from elastic.driver.stopping import Stopping
from elastic.errors import RunFailedError, RunGoesOnError, RunStoppedError
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.events import BY_HAND, RunEnded, RunStarted, StopRequested
from elastic.protocol.job import Job
from elastic.protocol.rpc import Remote, until_answered
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.supervisor_api import WAIT_S, Ending, SupervisorApi
from elastic.ray_compat.cluster import NAMESPACE, find_actor
from elastic.ray_compat.kept import kept_stop
from elastic.reporting.conclusion import recorded_ending
from elastic.reporting.event_log import has_begun, last_event, read_events
from elastic.reporting.report import Report
from trainer.config import TrainConfig
from trainer.errors import ConfigError

log = logging.getLogger(__name__)

_GONE_S = 10.0
"""How long Ray may take to free the name of an actor that was ended."""
_LOOK_S = 0.05

_SILENT_S = 120.0
"""How long a supervisor may be silent to whoever looks for its run. Ray takes some 65 s to notice
that its machine is gone, and some more to start it on another."""


def may_be_going_on(paths: RunPaths) -> bool:
    """Whether the records of a run have no end yet. Needs no cluster."""
    return paths.events.exists() and not isinstance(last_event(paths.events), RunEnded)


def is_starting(paths: RunPaths) -> bool:
    """Whether a start was asked for that the records do not tell of yet, or that was lost on the
    way. Needs no cluster."""
    if not paths.starting.exists():
        return False
    return not has_begun(paths.events, float(paths.starting.read_text()))


def has_finished(paths: RunPaths) -> bool:
    """Whether the last start of the run did all steps that it was told to, by the end of its
    records. Needs no cluster."""
    end = last_event(paths.events) if paths.events.exists() else None
    return isinstance(end, RunEnded) and end.outcome == "finished"


def find_run(paths: RunPaths, *, looks_only: bool = False) -> Remote[SupervisorApi] | None:
    """The supervisor of the run that is going on in this run directory, on the cluster that this
    process has joined; None where none is. One whose run is over is ended, for another to take its
    name; where whoever asks `looks_only` it is left to write the report.

    Raises:
        RunGoesOnError: the supervisor is there, and does not answer.
    """
    deadline = time.monotonic() + _GONE_S
    while (handle := find_actor(paths.key)) is not None and time.monotonic() < deadline:
        with contextlib.suppress(ray.exceptions.RayActorError):
            run = Remote[SupervisorApi](handle)
            if _is_going_on(run, paths):
                return run
            if looks_only:
                return None
            ray.kill(handle)
        time.sleep(_LOOK_S)
    return None


def _is_going_on(run: Remote[SupervisorApi], paths: RunPaths) -> bool:
    try:
        return until_answered(lambda: run.send(SupervisorApi.going_on), _SILENT_S)
    except ray.exceptions.GetTimeoutError as silent:
        raise RunGoesOnError(
            "run_config.name",
            paths.root.name,
            f"a run of this name is going on, and its supervisor (Ray's actor {paths.key} in the "
            f"namespace {NAMESPACE}) has not answered in {_SILENT_S:g} s",
            "Is its process frozen? Let it go on, or kill it: Ray starts another. The coordinator "
            "ends such a run after health.supervisor_timeout_s",
        ) from silent


def is_leaving(paths: RunPaths, prefix: str) -> bool:
    """Whether the run that goes on ends as its driver was sent a signal: after the step that was
    under way then, though it may save for minutes. Not so where somebody wants it to end.

    Args:
        paths: its directory.
        prefix: of its names.
    """
    # By the order of the lines: their times may be of two machines.
    told = read_events(paths.events, kinds=(RunStarted, StopRequested), lenient=True)
    if told and isinstance(told[-1], StopRequested):
        return told[-1].reason != BY_HAND
    return kept_stop(prefix) is not None


def check_same(
    job: Job,
    *,
    train: TrainConfig,
    scaling: ScalingConfig,
    checkpoint: CheckpointConfig,
    health: HealthConfig,
) -> None:
    """Checks that the run of `job`, which is going on, has these settings; its task is not
    compared. See `_same` for a schedule, an optimizer or a converter of the user's own.

    Raises:
        ConfigError: naming the first field that differs.
    """
    pairs: dict[str, tuple[Any, Any]] = {
        "train": (replace(train, task=None), job.train),
        "scaling": (scaling, job.scaling),
        "checkpoint": (checkpoint, job.checkpoint),
        "health": (health, job.health),
    }
    for name, (now, there) in pairs.items():
        for field in fields(now):
            value, before = getattr(now, field.name), getattr(there, field.name)
            if not _same(value, before):
                raise ConfigError(
                    f"{name}.{field.name}",
                    value,
                    f"a run of this name is going on, with {before!r}",
                    f"Use {before!r} to attach to it, or `elastic attach {job.paths.root}`, which "
                    f"asks for no settings; end it with `elastic stop {job.paths.root}`, or use "
                    f"another run_config.name",
                )


def _same(one: Any, other: Any) -> bool:
    """Whether two settings say the same: their types by name, for a class of the program itself
    crosses by value and is another class in the next driver; a dataclass field by field, and an
    object that is none by its type alone."""
    if isinstance(one, int | float | str | None):
        return bool(one == other)
    if type_name(one) != type_name(other):
        return False
    if is_dataclass(one):
        return all(_same(getattr(one, at.name), getattr(other, at.name)) for at in fields(one))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return True


def follow(
    run: Remote[SupervisorApi],
    coordinator: Remote[CoordinatorApi],
    prefix: str,
    observer: Observer,
) -> Report:
    """Shows a run until it ends. The first Ctrl-C or SIGTERM has it save and stop, the second ends
    it at once.

    Args:
        run: its supervisor.
        coordinator: its coordinator.
        prefix: of its names.
        observer: tells the callbacks.

    Returns:
        The report, which is written by then.

    Raises:
        RunFailedError: the run ended with an error, or nobody knows that it finished.
        RunStoppedError: somebody else has stopped it.
    """
    stopping = Stopping(coordinator, prefix)
    try:
        with stopping:
            observer.start()
            ending = await_end(run, observer.paths)
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(ray.exceptions.RayActorError):  # its records tell how it ended
            run.call(SupervisorApi.interrupt)
        await_end(run, observer.paths)
        try:
            _conclude(run, observer)
        except Exception:  # whoever has interrupted is told that it has ended, come what may
            log.exception("the report of the interrupted run could not be written")
        raise
    try:
        report = _conclude(run, observer)
    except Exception as unreported:
        if ending.error is None:
            raise
        raise RunFailedError(ending.error, ending.cause) from unreported
    if ending.error is not None:
        raise RunFailedError(ending.error, ending.cause)
    stopping.settle()
    outcome = "interrupted" if ending.interrupted else report.outcome
    if outcome == "finished" or stopping.asked:
        return report
    root = observer.paths.root
    if outcome in ("stopped", "interrupted"):
        raise RunStoppedError(str(root), outcome, report.steps)
    raise RunFailedError(
        f"the run in {root} has ended after {report.steps} steps, and its records do not say that "
        f"it finished (outcome: {outcome}): its coordinator was lost at the end, or its storage "
        f"refused. The same command goes on with it, unless it has resume='never'"
    )


def watch(run: Remote[SupervisorApi], observer: Observer) -> Ending:
    """Shows a run until it ends.

    Args:
        run: its supervisor.
        observer: tells the callbacks.
    """
    observer.start()
    ending = await_end(run, observer.paths)
    observer.finish()
    return ending


def _conclude(run: Remote[SupervisorApi], observer: Observer) -> Report:
    """The run has ended: writes the report, and lets the supervisor go."""
    try:
        return observer.finish()
    finally:
        ray.kill(run.handle)


def await_end(run: Remote[SupervisorApi], paths: RunPaths) -> Ending:
    """Waits for the end of a run. Where its supervisor does not live to tell, its records may."""
    while (ending := look_for_end(run, paths)) is None:
        pass
    return ending


def look_for_end(run: Remote[SupervisorApi], paths: RunPaths) -> Ending | None:
    """As `await_end`; None where it does not come in WAIT_S."""
    try:
        return run.call(SupervisorApi.ending, WAIT_S)
    except ray.exceptions.RayActorError as gone:
        lost = Ending(error=f"its supervisor was ended ({gone}); run the same name again")
        return recorded_ending(paths) or lost
