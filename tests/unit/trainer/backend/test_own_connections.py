"""A process's connections as the kernel names them, looked at by several threads at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from trainer.backend.groups import abort_groups, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.backend.silence import Connections, towards
from trainer.parallel.layout import ParallelDims

_LOOKS = 1000


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def looked_at(server: socket.socket) -> Iterator[int]:
    """The port of a connection that another thread looks at all the time."""
    port, end = server.getsockname()[1], threading.Event()

    def look() -> None:
        while not end.wait(0.0001):
            towards(port)

    with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
        thread = threading.Thread(target=look)
        thread.start()
        yield port
        end.set()
        thread.join()


def test_a_connection_is_not_lost_because_another_thread_looks_at_it(looked_at: int) -> None:
    connection = Connections(towards(looked_at))
    assert not any(connection.lost() for _ in range(_LOOKS))


def test_a_connection_is_cut_though_another_thread_looks_at_it(
    looked_at: int, server: socket.socket
) -> None:
    for _ in range(_LOOKS):
        before = towards(looked_at)
        with socket.create_connection(("127.0.0.1", looked_at)) as made, server.accept()[0]:
            Connections(towards(looked_at) - before).cut()
            made.setblocking(False)
            assert made.recv(1) == b""  # else it blocks, which raises


def test_a_call_cuts_those_of_a_group_on_gloo_though_something_else_uses_cuda(
    server: socket.socket, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a dataset that decodes on the GPU."""
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
    address = server.getsockname()
    with (
        socket.create_connection(address) as made,
        server.accept()[0],
        monkeypatch.context() as cuda,
    ):
        cuda.setattr(torch.cuda, "is_initialized", lambda: True)
        for end in abort_groups(replica=Connections(towards(address[1]))):
            end.result()
        made.setblocking(False)
        assert made.recv(1) == b""  # else it blocks, which raises
