"""`elastic`: the parser's root, and errors as exit statuses.

0  done       1  `verify` or `doctor` found something wrong; `attach`, `stop`: the run failed;
                 `dryrun`: it does not fit; `watch`: the run failed, or something is wrong with it;
                 `logs`, `clear`: a node that lives did not answer
93 `attach`, `stop`, `watch`: the run failed, and starting it again is useless
2  bad input, or what was asked cannot be done: one line on standard error says why
3, 4, 5          `doctor` found something worse (`elastic/doctor/finding.py`)
130, 143         Ctrl-C, SIGTERM: what an export, an import or `prepare` had begun was put in order
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version

from checkpointing import CheckpointError
from elastic.cli import (
    actions,
    checkpoints,
    clear,
    doctor,
    dryrun,
    live,
    logs,
    nodes,
    prepare,
    watch,
)
from elastic.errors import ElasticError
from elastic.reporting.event_log import RecordError
from trainer.errors import TrainerError

_PUT_IN_ORDER = (actions.export, actions.import_state, prepare.run)
"""What leaves things behind when it is ended on the spot."""
_AT_ONCE_S = 1.0


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status. `arguments` default to the process's own."""
    options = parser().parse_args(arguments)
    try:
        with _interrupted_by_sigterm() if options.action in _PUT_IN_ORDER else nullcontext():
            return int(options.action(options))
    except _told_in_a_line() as error:
        if isinstance(error, BrokenPipeError):  # whoever read our output has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"elastic: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except _TerminatedError:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """In this block SIGTERM, where it would end this process on the spot, ends what is done as
    Ctrl-C does. A second one at once changes nothing, as `timeout` sends two; a later one ends the
    process on the spot: storage that hangs may hold up what is put in order."""
    takes = threading.current_thread() is threading.main_thread()
    if not takes or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    first_s: list[float] = []

    def interrupt(*_: object) -> None:
        first_s.append(time.monotonic())
        if len(first_s) == 1:
            raise _TerminatedError
        if first_s[-1] - first_s[0] > _AT_ONCE_S:
            os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _told_in_a_line() -> tuple[type[Exception], ...]:
    """Ours, and Ray's where a command has imported it: a cluster that refuses us, or is lost
    meanwhile. With a traceback comes status 1, as for a run that has failed."""
    ray = sys.modules.get("ray")
    rays = () if ray is None else (ray.exceptions.RayError,)
    return (CheckpointError, ElasticError, RecordError, TrainerError, OSError, *rays)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="elastic", description="Elastic, fault-tolerant training on Ray: tools for runs."
    )
    root.add_argument("--version", action=_Version, nargs=0, help="show it and leave")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    checkpoints.add_to(commands)
    live.add_to(commands)
    clear.add_to(commands)
    logs.add_to(commands)
    watch.add_to(commands)
    nodes.add_to(commands)
    dryrun.add_to(commands)
    prepare.add_to(commands)
    doctor.add_to(commands)
    return root


class _Version(argparse.Action):
    """Looks for it where it is asked for: without an installation there is none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            known = version("elastictrainer")
        except PackageNotFoundError:
            known = "not installed"
        print(f"elastic {known}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
