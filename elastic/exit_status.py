"""With which status a process ends that a run has failed in: whoever starts it again must know
whether that is of use.

Source of the number: nvidia-resiliency-ext, whose launchers end with 93 where a job is not to be
queued again.
"""

from __future__ import annotations

import signal
import sys
from types import TracebackType

from checkpointing import CheckpointConfigError
from elastic.errors import RunFailedError, RunGoesOnError, RunStoppedError
from elastic.protocol.causes import entry_of
from trainer.errors import ConfigError

FAILED = 1
RETRY_IS_USELESS = 93
INTERRUPTED = 128 + signal.SIGINT
"""As a shell has it."""


def decide_exit_status(error: BaseException) -> int:
    """The status of a process that `error` ends.

    A retry is not wanted where somebody has stopped the run. It is useless where the settings
    cannot work, and where a cause came back that only a change of code, data or settings mends
    (`CauseEntry.needs_change`). It may help where memory ran out, machines were taken away or
    missing, a budget of losses was spent, or storage failed; and where another process has the run
    for now.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, RunGoesOnError):
        return FAILED
    if isinstance(error, ConfigError | CheckpointConfigError | RunStoppedError):
        return RETRY_IS_USELESS
    if isinstance(error, RunFailedError):
        return decide_status_of(error.cause)
    return FAILED


def decide_status_of(cause: str | None) -> int:
    """The status for a run that failed as `cause` came back, None where none did."""
    useless = cause is not None and entry_of(cause).needs_change
    return RETRY_IS_USELESS if useless else FAILED


def tell_exit_status() -> None:
    """From now on this process ends with the status of an error that nobody catches, which is shown
    as before. Ctrl-C too: Python ends with 1 where code that runs after it calls `exec`, as
    libraries do while the process ends. A shell of Python's own goes on after it."""
    show = sys.excepthook

    def end(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        show(kind, error, traceback)
        status = decide_exit_status(error)
        asks = status == INTERRUPTED and hasattr(sys, "ps1")
        if status != FAILED and not asks:
            sys.exit(status)

    sys.excepthook = end
