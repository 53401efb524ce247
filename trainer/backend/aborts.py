"""Ends process groups from outside, so that whoever waits in one comes back: on NCCL, which hears
nothing by itself.

One thread does it, in the order in which it was asked: an abort may block, c10d runs it on a thread
of its own that it waits for, and NCCL's own groups of calls belong to a thread (NVIDIA/nccl issue
564), so two of them at once may wait for each other. A group is aborted once, whoever asks.

Who hears calls asks for it and waits for nothing; who leaves a group waits until it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

THREAD = "abort"
"""Name of the thread."""

_thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
_asking = threading.Lock()
_ends: dict[int, tuple[Any, Future[Any]]] = {}
"""Groups that were aborted, or are to be, by their identity, until they are forgotten."""


def in_order(work: Callable[[], object]) -> Future[Any]:
    """Has the thread do `work` after all that it was asked for before. Waits for nothing."""
    return _thread.submit(work)


def abort(group: Any) -> Future[Any]:
    """Has a group ended, once. Waits for nothing.

    Args:
        group: has an `abort`, which may block.
    """
    with _asking:
        if id(group) not in _ends:
            _ends[id(group)] = group, in_order(group.abort)
        return _ends[id(group)][1]


def forget(group: Any) -> None:
    """A group that has ended is let go of."""
    with _asking:
        _ends.pop(id(group), None)
