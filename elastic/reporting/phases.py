"""A line for each phase before a run starts, and how far a long one is: in a terminal a bar, in a
log a line a minute.

It listens to `trainer.progress`. The progress line of the run itself is `progress.py`'s.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from elastic.reporting.progress import CLEAR_LINE, TTY_INTERVAL_S, format_duration
from trainer.progress import listening

_BAR = 24
_LOG_INTERVAL_S = 60.0
"""Between two lines of one phase in a log: it may take hours."""


@contextmanager
def phases(stream: TextIO) -> Iterator[None]:
    """Prints what this thread tells of, while the context lasts."""
    printer = PhasePrinter(stream)
    try:
        with listening(printer.tell):
            yield
    finally:
        printer.end()


def format_phase(what: str, done: int, total: int) -> str:
    """The line of a phase that is under way."""
    if not total:
        return what
    full = _BAR * done // total
    return f"{what} [{'#' * full}{' ' * (_BAR - full)}] {100 * done // total} %"


def format_share(what: str, done: int, total: int, seconds: float) -> str:
    """The line of a phase that is under way in a log.

    Args:
        what: is being done.
        done: of `total`; more than 0.
        total: how much there is.
        seconds: that it has taken so far.
    """
    left_s = seconds * (total - done) / done
    return f"{what}: {100 * done // total} %, {format_duration(left_s)} left"


class PhasePrinter:
    """Prints phases. A stream that takes nothing, as on a full disk, costs lines.

    Args:
        stream: where to print; a terminal gets bars, another one a line a minute.
        clock: seconds that only grow.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._is_tty = stream, clock, stream.isatty()
        self._what: str | None = None
        self._began_at = self._printed_at = float("-inf")

    def tell(self, what: str, done: int, total: int) -> None:
        """See `trainer.progress.Listener`."""
        now, begins = self._clock(), what != self._what
        if begins:
            self.end()
            self._what, self._began_at = what, now
        elif now - self._printed_at < (TTY_INTERVAL_S if self._is_tty else _LOG_INTERVAL_S):
            return
        self._printed_at = now
        if self._is_tty:
            # One column stays free: a full last column makes some terminals wrap.
            text = format_phase(what, done, total)[: shutil.get_terminal_size().columns - 1]
            self._put(CLEAR_LINE + text)
        elif begins:
            self._put(f"{what}\n")
        elif done:
            self._put(f"{format_share(what, done, total, now - self._began_at)}\n")

    def end(self) -> None:
        """The last phase is over: its line stays, without a bar."""
        if self._what is not None and self._is_tty:
            self._put(f"{CLEAR_LINE}{self._what}\n")
        self._what = None

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.write(text)
            self._stream.flush()
