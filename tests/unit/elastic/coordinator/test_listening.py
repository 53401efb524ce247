"""Where the coordinator listens: whoever reaches the store's port may do as he likes."""

from __future__ import annotations

import socket

import pytest

from elastic.coordinator.listening import host_store, open_beats
from tests.support.sockets import connections_to

HERE, NOT_HERE = "127.0.0.1", "192.0.2.1"


def test_the_store_is_reached_by_its_own_address_and_by_no_other() -> None:
    store = host_store(HERE)
    store.set("key", "value")
    assert store.get("key") == b"value"
    socket.create_connection((HERE, store.port), timeout=10).close()
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=10)


def test_a_machine_that_does_not_have_its_own_address_listens_on_all() -> None:
    """Behind an address translation."""
    store = host_store(NOT_HERE)
    store.set("key", "value")
    for address in (HERE, "127.0.0.2"):
        socket.create_connection((address, store.port), timeout=10).close()


def test_connections_of_machines_that_are_gone_are_closed_in_time() -> None:
    store = host_store(HERE)
    store.set("key", "value")  # by its own connection, of which both ends are here
    (own,) = connections_to(store.port)
    (accepted,) = connections_to(own.getsockname()[1])
    with own, accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        bound_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert bound_ms == 60_000


def test_beats_are_heard_on_its_own_address_or_where_it_has_none_such_on_all() -> None:
    with open_beats(HERE) as here, open_beats(NOT_HERE) as elsewhere:
        assert here.getsockname()[0] == HERE
        assert elsewhere.getsockname()[0] == "0.0.0.0"
