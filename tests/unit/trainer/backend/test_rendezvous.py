"""Connections to the store that are made ahead, and the threads that make them."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from trainer.backend.rendezvous import THREAD, Rendezvous, close_connections


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
    meet.store("second")  # one that was made ahead; another is made, towards a store that is gone
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
