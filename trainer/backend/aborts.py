"""Ends process groups from outside, so that whoever waits in one comes back: on NCCL, which hears
nothing by itself.

All begin at once, each on a thread of its own. An abort first tells its own kernels to end, then
may wait for the whole device, and so for a kernel of another group, which only that group's abort
ends (pytorch issue 119797, NVIDIA/nccl issue 1013): one after the other, the first would wait for
the second for ever. NCCL's own groups of calls, meant for this, belong to a thread (NVIDIA/nccl
issue 564), and c10d aborts on threads of its own. A group is aborted once, whoever asks.

Who hears calls asks for it and waits for nothing; who leaves a group waits until it has ended.
Decision: docs/decisions/045.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

THREAD = "abort"
"""Name of the threads."""

_MOST = 64
"""Threads: far more than a worker has groups."""

_threads = ThreadPoolExecutor(_MOST, thread_name_prefix=THREAD)
_asking = threading.Lock()
_ends: dict[int, tuple[Any, Future[Any]]] = {}
"""Groups that were aborted, or are to be, by their identity, until they are forgotten."""


def begin(work: Callable[[], object]) -> Future[Any]:
    """Has a thread do `work` now, whatever the others wait for. Waits for nothing."""
    return _threads.submit(work)


def abort(group: Any) -> Future[Any]:
    """Has a group ended, once. Waits for nothing.

    Args:
        group: has an `abort`, which may block.
    """
    with _asking:
        if id(group) not in _ends:
            _ends[id(group)] = group, begin(group.abort)
        return _ends[id(group)][1]


def forget(group: Any) -> None:
    """A group that has ended is let go of."""
    with _asking:
        _ends.pop(id(group), None)
