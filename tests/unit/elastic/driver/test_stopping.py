"""Signals to a driver, and a coordinator that cannot take its call; without Ray."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from elastic.driver.stopping import Stopping
from elastic.protocol.rpc import Remote
from elastic.ray_compat.kept import forget, kept_stop
from tests.support.kept_in_memory import KeptInMemory

PATIENCE_S = 20.0


class Frozen(Remote[Any]):
    """A coordinator that answers no call until the test is over."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sent: list[str] = []
        self.over = threading.Event()

    def send(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.sent.append(method.__name__)

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.over.wait(PATIENCE_S)


@pytest.fixture
def frozen() -> Iterator[Frozen]:
    coordinator = Frozen()
    yield coordinator
    coordinator.over.set()


@pytest.fixture
def stopping(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopping]:
    """Not entered yet; a handler of SIGTERM that the test sets is taken away after it."""
    KeptInMemory(monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    yield Stopping(frozen, "run/1/")
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_as_a_shell_has_it_where_ray_has_taken_it(stopping: Stopping) -> None:
    with pytest.raises(RuntimeError, match="Unknown keyword"):
        ray.init("local", no_such_setting=1)  # takes the signal, and starts nothing
    with stopping:
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        stopping.settle()
    assert ended.value.code == 143


def test_sigterm_is_the_users_where_they_have_taken_it(stopping: Stopping) -> None:
    taken: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
    with stopping:
        signal.raise_signal(signal.SIGTERM)
    assert taken == []
    stopping.settle()
    assert taken == [signal.SIGTERM]


def test_a_stop_outlives_a_driver_whose_coordinator_does_not_answer(
    frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray job stop` kills it 3 s after the signal: the next coordinator must know."""
    store = KeptInMemory(monkeypatch)
    with Stopping(frozen, "run/1/") as stopping:
        signal.raise_signal(signal.SIGTERM)
        assert stopping.asked and store.put.wait(PATIENCE_S)
    assert frozen.sent == ["wind_down"]
    assert kept_stop("run/1/") == "SIGTERM"
    assert kept_stop("run/2/") is None, "the next start is not to stop"
    forget("run/1/")
    assert kept_stop("run/1/") is None
