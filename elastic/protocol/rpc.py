"""Typed calls to actors.

Ray's own handle has any method with any arguments. `Remote` is one that knows the actor's methods:
a misspelled call, or one with a wrong argument, is a type error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray
from ray import ObjectRef

RETRY_S = 0.1

_Methods = TypeVar("_Methods", covariant=True)
_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")


class Remote(Generic[_Methods]):
    """The handle of an actor that has the methods of a class or protocol. It may cross Ray.

    Args:
        handle: Ray's.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def call(
        self,
        method: Callable[Concatenate[_Methods, _Args], Coroutine[Any, Any, _Answer]],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Answer:
        """Calls an async `method` until it is answered, as often as the actor's process is started
        anew. It must be idempotent: an answer may be lost after the deed.

        Raises:
            ray.exceptions.RayError: the actor has died for good, or the method raised.
        """
        return until_answered(lambda: self.send(method, *args, **kwargs))

    @overload
    def send(
        self,
        method: Callable[Concatenate[_Methods, _Args], Coroutine[Any, Any, _Answer]],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> ObjectRef[_Answer]: ...

    @overload
    def send(
        self,
        method: Callable[Concatenate[_Methods, _Args], _Answer],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> ObjectRef[_Answer]: ...

    def send(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """Calls `method` once and waits for nothing. Returns what its answer comes in."""
        answer: ObjectRef[Any] = getattr(self.handle, method.__name__).remote(*args, **kwargs)
        return answer


def until_answered(
    send: Callable[[], ObjectRef[_Answer]], timeout_s: float | None = None
) -> _Answer:
    """As `Remote.call`, for a call whose arguments may change from one try to the next.

    Args:
        send: makes the call.
        timeout_s: how long an actor that lives may be silent; None: for ever, as one may that is
            frozen.

    Raises:
        ray.exceptions.GetTimeoutError: it was silent for longer.
    """
    while True:
        try:
            return ray.get(send(), timeout=timeout_s)
        except ray.exceptions.ActorUnavailableError:
            time.sleep(RETRY_S)


def last_line(error: Exception) -> str:
    """Ray puts the whole remote traceback into an error's text; its last line is the fact."""
    return str(error).strip().splitlines()[-1]


def restarting(answer: ObjectRef[Any]) -> bool:
    """Whether the call that `answer` (ready) belongs to was lost in a restart."""
    try:
        ray.get(answer)
    except ray.exceptions.ActorUnavailableError:
        return True
    except ray.exceptions.RayError:
        return False
    return False
