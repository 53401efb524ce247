"""Agents try the connections between their nodes."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.node.link_door import LinkDoor
from trainer.backend.interface import GLOO_VARIABLE
from trainer.backend.link_exchange import Address

LOOPBACK = ("127.0.0.1", 7001)
LONG_S = 60.0


def try_all(
    doors: dict[int, LinkDoor], addresses: dict[int, Address], bound_s: float
) -> dict[int, dict[int, int] | None]:
    """What each finds, all at once."""

    def one(rank: int) -> dict[int, int] | None:
        peers = {peer: address for peer, address in addresses.items() if peer != rank}
        return doors[rank].try_links(rank, peers, bound_s)

    with ThreadPoolExecutor(len(doors)) as pool:
        return dict(zip(doors, pool.map(one, doors), strict=True))


@pytest.mark.parametrize("towards", [LOOPBACK, ("::1", 7001)])
def test_good_connections_carry_all_and_nobody_waits_for_the_bound(
    towards: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GLOO_VARIABLE, raising=False)
    if towards != LOOPBACK and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    doors = {rank: LinkDoor(towards) for rank in range(3)}
    for _ in range(2):
        began = time.monotonic()
        assert try_all(doors, {r: door.open() for r, door in doors.items()}, LONG_S) == {
            0: {},
            1: {},
            2: {},
        }
        assert time.monotonic() - began < LONG_S / 2


def test_one_that_takes_connections_and_sends_nothing_is_named() -> None:
    doors = {rank: LinkDoor(LOOPBACK) for rank in range(2)}
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host, port = mute.getsockname()
        addresses = {0: doors[0].open(), 1: doors[1].open(), 2: (host, port)}
        assert try_all(doors, addresses, bound_s=0.5) == {0: {2: 0}, 1: {2: 0}}


def test_who_does_not_listen_says_nothing() -> None:
    """As an agent that was started anew between the two calls."""
    door = LinkDoor(LOOPBACK)
    assert door.try_links(0, {}, LONG_S) is None
    door.open()
    assert door.try_links(0, {}, LONG_S) == {}
    assert door.try_links(0, {}, LONG_S) is None
