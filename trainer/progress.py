"""What is being done before a run starts, for whoever wants to show it.

Data are prepared below, and shown above: in between is one function, `tell`. Nobody listens unless
somebody has said so with `listening`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]
"""Called with what is done, how much of it is done, and how much there is; 0 of 0: not known."""


def _nobody(what: str, done: int, total: int) -> None:
    pass


_listener: ContextVar[Listener] = ContextVar("listener", default=_nobody)


def tell(what: str, done: int = 0, total: int = 0) -> None:
    """Says that `what` is being done, and how far it is. Cheap: call it as often as you like."""
    _listener.get()(what, done, total)


def present_listener() -> Listener:
    """For code that another thread may run."""
    return _listener.get()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Has `listener` told what this thread does, while the context lasts."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
