"""Connections that are tried: good ones, and peers that do not send what they should."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from trainer.backend.groups import gather
from trainer.backend.link_test import try_links
from trainer.backend.rendezvous import Rendezvous, close_connections
from trainer.errors import GroupError

LONG_S = 60.0


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr(
        "trainer.backend.rendezvous.CONNECTIONS", 4
    )  # as many workers in one process
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=store.port, timeout_s=LONG_S)
    close_connections()  # while there is somebody to connect to


def try_together(meet: Rendezvous, ranks: range, size: int, bound_s: float) -> list[dict[int, int]]:
    def one(rank: int) -> dict[int, int]:
        return try_links(meet, "links/1", rank=rank, size=size, leave_now=bool, bound_s=bound_s)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_good_connections_carry_all_and_nobody_waits_for_the_bound(meet: Rendezvous) -> None:
    began = time.monotonic()
    found = try_together(meet, range(4), 4, LONG_S)
    assert found == [{}] * 4
    assert time.monotonic() - began < LONG_S / 2


def test_a_group_of_one_has_no_connections(meet: Rendezvous) -> None:
    assert try_together(meet, range(1), 1, LONG_S) == [{}]


@contextlib.contextmanager
def mute_peer(meet: Rendezvous, rank: int, size: int, says: bytes) -> Iterator[threading.Event]:
    """A peer whose large messages are lost: it takes what comes, and sends only `says`. Yields what
    is set once it has."""
    said, over = threading.Event(), threading.Event()

    def be_mute() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
            store = dist.PrefixStore("links/1", dist.TCPStore(meet.host, meet.port))
            store.set(str(rank), f"127.0.0.1 {server.getsockname()[1]}")
            with gather(meet, "links/1", size, over.is_set):
                pass
            for peer in set(range(size)) - {rank}:
                host, port = store.get(str(peer)).decode().split()
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(says)
            said.set()
            over.wait(LONG_S)

    thread = threading.Thread(target=be_mute)
    thread.start()
    yield said
    over.set()
    thread.join()


@pytest.mark.parametrize(
    ("says", "came"), [(b"", 0), (b"\0\0\0\2" + bytes(60), 64)], ids=["nothing", "little"]
)
def test_a_peer_whose_message_does_not_come_is_named(
    meet: Rendezvous, says: bytes, came: int
) -> None:
    with mute_peer(meet, 2, 3, says):
        found = try_together(meet, range(2), 3, bound_s=1.0)
    assert found == [{2: came}, {2: came}]


def test_a_call_ends_the_wait_for_a_message(meet: Rendezvous) -> None:
    with mute_peer(meet, 1, 2, b"") as said, pytest.raises(GroupError, match="left"):
        try_links(meet, "links/1", rank=0, size=2, leave_now=said.is_set, bound_s=LONG_S)


def test_a_call_ends_the_wait_for_a_peer(meet: Rendezvous) -> None:
    told = threading.Event()

    def watch() -> None:
        dist.PrefixStore("links/1", dist.TCPStore(meet.host, meet.port)).wait(["0"])
        told.set()

    watching = threading.Thread(target=watch)
    watching.start()
    with pytest.raises(GroupError, match="left"):
        try_links(meet, "links/1", rank=0, size=2, leave_now=told.is_set, bound_s=LONG_S)
    watching.join()
