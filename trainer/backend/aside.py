"""What waits in native code, on a thread of its own, which a call to leave lets be.

Gloo waits in its constructor for the addresses and the connections of all peers, and hears no call
there: one that dies meanwhile would hold up the others until the timeout. c10d makes the groups of
a replica itself, those of its mesh included, so it is given a backend of this name for that.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trainer.backend.polling import poll_until
from trainer.errors import GroupError

GLOO = "gloo_aside"
"""c10d's name for Gloo that connects on a thread of its own."""

THREAD = "make-groups"
"""Name of the threads."""

_T = TypeVar("_T")

_leave_now: Callable[[], bool] = bool
"""Asked while c10d has a group made."""

_timeout: timedelta | None = None
"""Of the groups that c10d has made, where it is not c10d's own choice."""


def make_aside(make: Callable[[], _T], leave_now: Callable[[], bool], timeout_s: float) -> _T:
    """What `make` returns, which runs on a thread.

    Raises:
        GroupError: it failed, takes longer than `timeout_s`, or `leave_now` became true.
    """
    made: queue.SimpleQueue[_T | GroupError] = queue.SimpleQueue()

    def work() -> None:
        try:
            made.put(make())
        except Exception as error:
            made.put(GroupError(str(error)))

    threading.Thread(target=work, name=THREAD, daemon=True).start()
    poll_until(lambda: not made.empty(), leave_now, timeout_s)
    result = made.get()
    if isinstance(result, GroupError):
        raise result
    return result


def threads_aside() -> list[threading.Thread]:
    """Those of this process that still run."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@contextlib.contextmanager
def heard_while_connecting(leave_now: Callable[[], bool], timeout: timedelta) -> Iterator[None]:
    """Groups of the backend `GLOO` that c10d makes in this block are given up once `leave_now` is
    true. All have `timeout`: c10d gives that of the default group to no other, and a mesh takes
    none."""
    global _leave_now, _timeout
    _leave_now, _timeout = leave_now, timeout
    try:
        yield
    finally:
        _leave_now, _timeout = bool, None


def _make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    bound = _timeout or timeout
    return make_aside(
        lambda: dist.ProcessGroupGloo(store, rank, size, bound), _leave_now, bound.total_seconds()
    )


dist.Backend.register_backend(GLOO, _make_gloo, devices=["cpu"])
