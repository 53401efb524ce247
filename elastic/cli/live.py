"""`elastic attach` and `elastic stop`: for runs that are going on."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from checkpointing.named_directory import named_directory
from elastic.exit_status import decide_status_of
from elastic.protocol.events import BY_HAND, RunEnded
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import last_event
from trainer.errors import ConfigError

if TYPE_CHECKING:  # it imports Ray
    from elastic.protocol.supervisor_api import Ending

_RUN = "the run's directory, storage_path/name, as this machine sees it"
_ADDRESS = "of the Ray cluster (default: RAY_ADDRESS, else the one on this machine)"


def add_to(commands: Any) -> None:
    """Adds both to the parsers of `commands`."""
    attach = commands.add_parser(
        "attach",
        help="show a run that is going on, until it ends",
        description="Shows the progress of a run until it ends, and its report. Ctrl-C leaves it; "
        "the run goes on. Exit status 1 where the run failed, 93 where a retry is useless.",
    )
    stop = commands.add_parser(
        "stop",
        help="have a run save and stop",
        description="Has a run stop after the step that is under way, with a checkpoint, and waits "
        "until it has. The same name again continues it. Exit status as of attach.",
    )
    stop.add_argument("--now", action="store_true", help="at once, without a checkpoint")
    for verb, action in ((attach, attach_to), (stop, stop_run)):
        add_run_to(verb)
        verb.set_defaults(action=action)


def add_run_to(verb: argparse.ArgumentParser) -> None:
    """Adds what names a run and the cluster that it is on."""
    verb.add_argument("run", metavar="RUN", help=_RUN)
    verb.add_argument("--address", help=_ADDRESS)


def attach_to(options: argparse.Namespace) -> int:
    """`attach`"""
    # Whoever looks on has nothing to put in order, and need not wait for Ray's connection to end.
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    from elastic.driver.observer import Observer
    from elastic.driver.running import watch

    run = _find(options)
    observer = Observer(paths_of(options), (), attaches=True, tensorboard=False)
    return tell(watch(run, observer))


def tell(ending: Ending) -> int:
    """Says how a run has ended, where it failed. Returns the status for it."""
    if ending.error is None:
        return 0
    print(f"elastic: the run failed: {ending.error}", file=sys.stderr)
    return decide_status_of(ending.cause)


def stop_run(options: argparse.Namespace) -> int:
    """`stop`"""
    from ray.exceptions import RayActorError

    from elastic.driver.running import await_end, has_finished
    from elastic.protocol.coordinator_api import CoordinatorApi
    from elastic.protocol.supervisor_api import SupervisorApi

    run = _find(options)
    when = "at once" if options.now else "after this step, with a checkpoint"
    print(f"asking the run to stop {when}, and waiting until it has", flush=True)
    with contextlib.suppress(RayActorError):  # it has just ended by itself
        if options.now:
            run.call(SupervisorApi.interrupt)
        else:
            coordinator = run.call(SupervisorApi.coordinator)
            coordinator.call(CoordinatorApi.wind_down, BY_HAND)
    paths = paths_of(options)
    ending = await_end(run, paths)
    if ending.error is None:
        by_itself = has_finished(paths)
        print(f"the run in {options.run} {'was over already' if by_itself else 'has stopped'}")
    return tell(ending)


def paths_of(options: argparse.Namespace) -> RunPaths:
    """Those of the run that is named; see `add_run_to`."""
    return RunPaths(root=named_directory(options.run))


def begun(options: argparse.Namespace) -> RunPaths:
    """Those of the run that is named.

    Raises:
        ConfigError: it is no run's directory.
    """
    paths = paths_of(options)
    if not paths.events.exists():
        fact = f"{paths.root} is no run's directory: it has no events.jsonl"
        raise ConfigError("RUN", options.run, fact, "Name a run's directory")
    return paths


def _find(options: argparse.Namespace) -> Any:
    """The run's supervisor.

    Raises:
        ConfigError: no such run is going on there.
    """
    from elastic.driver.running import find_run, may_be_going_on

    paths = paths_of(options)
    try:
        join(options.address)
    except ConfigError as error:
        # Where its records say that there is no such run, no address will find it.
        if may_be_going_on(paths):
            raise
        raise _not_going_on(options.run, paths) from error
    run = find_run(paths, looks_only=True)
    if run is None:
        raise _not_going_on(options.run, paths)
    return run


def _not_going_on(named: str, paths: RunPaths) -> ConfigError:
    """Why there is no run at that place on the cluster, as its records tell."""
    if not paths.events.exists():
        fact = f"no run is going on in {paths.root}, which has no events.jsonl"
        return ConfigError("RUN", named, fact, "Name a run's directory")
    last = last_event(paths.events)
    if isinstance(last, RunEnded):
        how = f"was {last.outcome}" if last.outcome in ("stopped", "interrupted") else last.outcome
        fact = f"no run is going on in {paths.root}: it {how} after {last.step} steps"
        return ConfigError("RUN", named, fact, f"Look at {paths.root / 'report.txt'}")
    fact = f"the records of {paths.root} have no end, and the run is not on this cluster"
    fix = "Give --address, and the directory as the run's machines see it; where its cluster is "
    fix += "gone, the same command goes on with the run, unless it has resume='never'"
    return ConfigError("RUN", named, fact, fix)


def join(address: str | None) -> None:
    """Joins a Ray cluster: that at `address`, of RAY_ADDRESS, or the one on this machine.

    Raises:
        ConfigError: there is none, or it cannot be joined.
    """
    import ray
    from ray.exceptions import RayError

    from elastic.ray_compat.cluster import warn_of_silence

    field, named = "--address", address
    if address is None and "RAY_ADDRESS" in os.environ:
        field, named = "RAY_ADDRESS", os.environ["RAY_ADDRESS"]
    if address is None:
        warn_of_silence()
    try:
        ray.init(
            address or "auto",
            ignore_reinit_error=True,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        raise ConfigError(
            field, named, f"there is no Ray cluster: {error}", "Name its address"
        ) from error
    except (ValueError, RuntimeError, RayError) as error:  # no HOST:PORT; another version; no token
        fix = "Use HOST:PORT of its head, here or as RAY_ADDRESS, and its versions"
        raise ConfigError(field, named, f"it cannot be joined: {error}", fix) from error
