"""Ends process groups from outside, so that whoever waits in one comes back: on NCCL, which hears
nothing by itself.

All begin at once, each on a thread of its own. An abort first tells its own kernels to end, then
may wait for the whole device, and so for a kernel of another group, which only that group's abort
ends (pytorch issue 119797, NVIDIA/nccl issue 1013): one after the other, the first would wait for
the second for ever. NCCL's own groups of calls, meant for this, belong to a thread (NVIDIA/nccl
issue 564), and c10d aborts on threads of its own. A group is aborted once, whoever asks.

Their threads are no executor's: Python would wait for those at exit, and an abort on a dead device
may never end.

One that has begun holds its communicator's lock, and whoever asks c10d there for the end of a
collective waits for that lock with the interpreter in hand: no thread could be started then. So
those of one call get their threads first.

Nobody waits for the end of an abort, but whoever makes the next group (`wait_for_ends`): its
kernels end at once, and the rest takes NCCL up to half a second, in which its threads sleep before
they look for a flag. Decision: docs/decisions/045.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

log = logging.getLogger(__name__)

THREAD = "abort"
"""Name of the threads."""

_LONG_S = 1.0
"""An abort that takes longer is worth a warning: a recovery takes that long at least."""


_asking = threading.Lock()
_ends: dict[int, tuple[Any, Future[Any]]] = {}
"""Groups that were aborted, or are to be, by their identity, until they are forgotten."""
_threads: list[threading.Thread] = []
"""Theirs, of which those that have ended may go."""


@contextlib.contextmanager
def together() -> Iterator[threading.Event]:
    """For several that are to begin at once: they wait for the event, which comes with the end of
    the block, when all have been given to threads."""
    all_there = threading.Event()
    try:
        yield all_there
    finally:
        all_there.set()


def begin(
    work: Callable[[], object],
    what: str,
    after: threading.Event | None = None,
    threads: list[threading.Thread] | None = None,
) -> Future[Any]:
    """Has a thread do `work` now, whatever the others wait for, and logs its end. Waits for
    nothing.

    Args:
        work: an abort, which may block.
        what: is aborted.
        after: what it waits for, of `together`.
        threads: takes that thread in.
    """

    def run() -> None:
        if after is not None:
            after.wait()
        try:
            end.set_result(work())
        except BaseException as error:
            end.set_exception(error)

    begun_s, end = time.monotonic(), Future[Any]()
    end.add_done_callback(partial(_log_end, what, begun_s))
    thread = _start(run)
    if threads is not None:
        threads[:] = [*(each for each in threads if each.is_alive()), thread]
    return end


def _start(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=THREAD, daemon=True)
    thread.start()
    return thread


def _log_end(what: str, begun_s: float, end: Future[Any]) -> None:
    took_s, error = time.monotonic() - begun_s, end.exception()
    if error is not None:
        kind = type(error).__name__
        log.warning("the abort of %s failed after %.3f s: %s: %s", what, took_s, kind, str(error))
    else:
        level = logging.WARNING if took_s > _LONG_S else logging.INFO
        log.log(level, "the abort of %s took %.3f s", what, took_s)


def abort_all(groups: Sequence[Any], what: str, after: threading.Event) -> list[Future[Any]]:
    """Has those groups ended that are among `groups`, each once; see `begin`.

    Args:
        groups: who leaves one takes it out of them before.
        what: each is.
        after: what they wait for, of `together`.
    """
    with _asking:
        return [_abort(group, what, after) for group in tuple(groups)]


def leave(group: Any, what: str) -> None:
    """Has a group that nobody will ask to end any more ended, once, and forgotten then."""
    with _asking:
        end = _abort(group, what, None)
    _forget_at(end, group)


def give_up(group: Any, what: str) -> None:
    """As `leave`, of a group that may have been aborted while it connected: that ended nothing, so
    it is done again."""
    with _asking:
        _ends.pop(id(group), None)
    leave(group, what)


def _abort(group: Any, what: str, after: threading.Event | None) -> Future[Any]:
    if id(group) not in _ends:
        _ends[id(group)] = group, begin(group.abort, what, after, _threads)
    return _ends[id(group)][1]


def _forget_at(end: Future[Any], group: Any) -> None:
    def forget(_: Future[Any]) -> None:
        with _asking:
            if _ends.get(id(group)) == (group, end):
                del _ends[id(group)]

    end.add_done_callback(forget)


def wait_for_ends(timeout_s: float | None = None) -> bool:
    """Waits until all groups have ended that were aborted, for so long at most, and says whether
    they have. Before a device gets the kernels of another group: what an abort frees may wait for
    them, and hold up a launch that one of them waits for. And what it has freed by then is there
    for that group."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    with _asking:
        threads = list(_threads)
    for thread in threads:  # c10d's destructors run there after the abort
        thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
