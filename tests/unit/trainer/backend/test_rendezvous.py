"""Connections to the store: made ahead, by threads of their own; and dead without a word."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.support.deaf_proxy import DeafProxy
from tests.support.sockets import connections_to
from trainer.backend import rendezvous
from trainer.backend.aside import threads_aside
from trainer.backend.groups import gather
from trainer.backend.polling import LEFT
from trainer.backend.rendezvous import THREAD, Rendezvous, close_connections
from trainer.errors import GroupError

PATIENCE_S = 20.0


def connecting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_no_thread_is_in_native_code_once_connections_are_closed() -> None:
    """Came one back from there while the interpreter ends, the process would abort."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    first = meet.store("first")
    first.set("key", "value")
    while connecting():
        connecting()[0].join()
    del store, first
    gc.collect()
    with pytest.raises(GroupError, match=LEFT):  # those made ahead are dead; more are being made
        meet.connect(lambda: bool(connecting()))
    assert connecting()
    began = time.monotonic()
    close_connections()
    assert not connecting() and time.monotonic() - began < 5


def test_connections_are_made_again_after_a_close() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    meet.store("a").set("key", "value")
    close_connections()
    assert meet.store("a").get("key") == b"value"


def test_threads_that_meet_at_once_share_what_is_made_ahead() -> None:
    """Else the threads of one of them would be nobody's, and never end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    callers = 8
    together = threading.Barrier(callers)

    def take() -> None:
        together.wait()
        meet.store("a")

    with ThreadPoolExecutor(callers) as pool:
        for _ in range(10):
            for taken in [pool.submit(take) for _ in range(callers)]:
                taken.result()
            close_connections()
            assert not connecting()


@pytest.fixture
def proxy() -> Iterator[DeafProxy]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with DeafProxy(store.port) as proxy:
        yield proxy
        close_connections()


def error_of(call: Callable[[], object]) -> tuple[BaseException | None, float]:
    """What a call raised, and after how long; it must not take for ever."""
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception(PATIENCE_S), time.monotonic() - began


def test_a_store_that_answers_no_more_is_waited_for_up_to_the_timeout(proxy: DeafProxy) -> None:
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=1)
    gather(meet, "one", 1, bool)
    proxy.deafen()
    error, seconds = error_of(lambda: gather(meet, "two", 2, bool))
    assert isinstance(error, GroupError) and "1 s (health.collective_timeout_s)" in str(error)
    assert seconds < 5


def test_a_call_is_heard_while_the_store_answers_no_more(proxy: DeafProxy) -> None:
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=600)
    gather(meet, "one", 1, bool)
    proxy.deafen()
    called = threading.Event()
    threading.Timer(0.5, called.set).start()
    error, seconds = error_of(lambda: gather(meet, "two", 2, called.is_set))
    assert isinstance(error, GroupError) and str(error) == LEFT
    assert called.is_set() and seconds < 5
    assert threads_aside(), "it waits for the answer"
    close_connections()
    assert not threads_aside()


def test_a_connection_that_is_never_answered_is_given_up_for_another(
    proxy: DeafProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch waits in the constructor for an answer, whatever the timeout."""
    monkeypatch.setattr(rendezvous, "_TRY_S", 0.5)
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=PATIENCE_S)
    proxy.deafen()
    with pytest.raises(GroupError, match=LEFT):
        gather(meet, "one", 1, lambda: proxy.swallowed >= 3)
    proxy.hear()
    gather(meet, "two", 1, bool)
    close_connections()
    assert not connecting() and not threads_aside()


def test_a_connection_that_has_died_since_it_was_made_is_passed_over(proxy: DeafProxy) -> None:
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=60)
    gather(meet, "one", 1, bool)
    while connecting():
        connecting()[0].join()
    proxy.drop()
    gather(meet, "two", 1, bool)


def test_the_kernel_watches_every_connection(proxy: DeafProxy) -> None:
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=60, silent_s=12)
    kept = meet.store("one")
    while connecting():
        connecting()[0].join()
    option, found = socket.IPPROTO_TCP, []
    for connection in connections_to(proxy.port):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s = connection.getsockopt(option, socket.TCP_KEEPIDLE)
        found.append((idle_s, connection.getsockopt(option, socket.TCP_USER_TIMEOUT)))
        connection.close()
    assert found == [(4, 12_000)] * 4, "one in use, and three made ahead"
    assert kept.check(["key"]) is False
