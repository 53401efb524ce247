"""SIGTERM, which schedulers such as Slurm and Kubernetes send some time before SIGKILL."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable

_terms: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` may be used in signal handlers


def catch_sigterm() -> None:
    """From now on SIGTERM is a notice: this process goes on until `on_sigterm`'s callback acts.

    Ray's own handler would end it at once. Call it on the process's main thread; in a Ray Train
    worker that is where `Backend.on_start` runs what it executes.

    Python's handlers wait until the main thread has time for them, which may be in native code. The
    interpreter writes to its wake-up descriptor at once. A child that is forked shares that: what
    `multiprocessing.Pool` ends it with would be this process's notice. So it catches nothing.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    os.register_at_fork(after_in_child=_catch_nothing)
    signal.signal(signal.SIGTERM, lambda number, _: _terms.put(number))
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=[heard], name="signals", daemon=True).start()


def _catch_nothing() -> None:
    """In a forked child, on what is its main thread, whichever that was before."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _listen(heard: int) -> None:
    while numbers := os.read(heard, 64):
        if signal.SIGTERM in numbers:
            _terms.put(signal.SIGTERM)


def on_sigterm(callback: Callable[[], None]) -> None:
    """Calls `callback` on a thread of its own at the first SIGTERM, even if that has come already.

    Needs `catch_sigterm` in this process. Call it once.
    """

    def wait() -> None:
        _terms.get()
        callback()

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
