"""A line for each phase before a run starts; in a terminal it says how far the phase is.

It listens to `trainer.progress`. The progress line of the run itself is `progress.py`'s.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from elastic.reporting.progress import CLEAR_LINE, TTY_INTERVAL_S
from trainer.progress import listening

_BAR = 24


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


class PhasePrinter:
    """Prints phases. A stream that takes nothing, as on a full disk, costs lines.

    Args:
        stream: where to print; a terminal gets bars.
        clock: seconds that only grow.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._is_tty = stream, clock, stream.isatty()
        self._what: str | None = None
        self._printed_at = float("-inf")

    def tell(self, what: str, done: int, total: int) -> None:
        """See `trainer.progress.Listener`."""
        if what != self._what:
            self.end()
            self._what = what
            if not self._is_tty:
                self._put(f"{what}\n")
        elif self._clock() - self._printed_at < TTY_INTERVAL_S:
            return
        if self._is_tty:
            self._printed_at = self._clock()
            # One column stays free: a full last column makes some terminals wrap.
            text = format_phase(what, done, total)[: shutil.get_terminal_size().columns - 1]
            self._put(CLEAR_LINE + text)

    def end(self) -> None:
        """The last phase is over: its line stays, without a bar."""
        if self._what is not None and self._is_tty:
            self._put(f"{CLEAR_LINE}{self._what}\n")
        self._what = None

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.write(text)
            self._stream.flush()
