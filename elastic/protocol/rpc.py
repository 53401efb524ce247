"""Calls to the coordinator that wait through its restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

RETRY_S = 0.1

Call = tuple[Any, tuple[Any, ...]]
"""(method of an actor, arguments): what may have to be asked once more."""


def ask(method: Any, *args: Any) -> Any:
    """Calls an actor's `method` until it is answered, as often as its process is started anew.

    What is asked must be idempotent: an answer may be lost after the deed.

    Raises:
        ray.exceptions.RayError: the actor has died for good, or the method raised.
    """
    return until_answered(lambda: method.remote(*args))


def until_answered(call: Callable[[], Any]) -> Any:
    """As `ask`, for a call whose arguments may change from one try to the next.

    Args:
        call: makes the call; returns its ObjectRef.
    """
    while True:
        try:
            return ray.get(call())
        except ray.exceptions.ActorUnavailableError:
            time.sleep(RETRY_S)


def restarting(answer: Any) -> bool:
    """Whether the call that `answer` (an ObjectRef, ready) belongs to was lost in a restart."""
    try:
        ray.get(answer)
    except ray.exceptions.ActorUnavailableError:
        return True
    except ray.exceptions.RayError:
        return False
    return False
