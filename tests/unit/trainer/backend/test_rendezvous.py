"""Connections to the store: made ahead, by threads of their own; and dead without a word."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.deaf_proxy import DeafProxy
from tests.support.hosts import requires_hosts
from tests.support.sockets import connections_to
from trainer.backend import rendezvous
from trainer.backend.aside import threads_aside
from trainer.backend.groups import (
    gather,
    leave_replica_group,
    make_cross_groups,
    make_replica_group,
)
from trainer.backend.polling import LEFT
from trainer.backend.rendezvous import THREAD, Rendezvous, close_connections
from trainer.backend.silence import Connections, towards
from trainer.errors import GroupError
from trainer.parallel.layout import ParallelDims
from trainer.recovery.heal_wire import Meeting

PATIENCE_S = 20.0


def connecting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def wait_until_made() -> None:
    """Those made ahead are there."""
    while connecting():
        connecting()[0].join()


def meet_alone(meet: Rendezvous, prefix: str) -> None:
    with gather(meet, prefix, 1, bool):
        pass


def meet_in_vain(meet: Rendezvous, prefix: str, leave_now: Callable[[], bool] = bool) -> None:
    with gather(meet, prefix, 2, leave_now):
        raise AssertionError("nobody else comes")


def test_no_thread_is_in_native_code_once_connections_are_closed() -> None:
    """Came one back from there while the interpreter ends, the process would abort."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    meet_alone(meet, "first")
    wait_until_made()
    del store
    gc.collect()
    with pytest.raises(GroupError, match=LEFT), meet.connection(lambda: bool(connecting())):
        raise AssertionError("those made ahead are dead; more are being made")
    assert connecting()
    began = time.monotonic()
    close_connections()
    assert not connecting() and time.monotonic() - began < 5


def test_connections_are_made_again_after_a_close() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    meet_alone(meet, "a")
    close_connections()
    meet_alone(meet, "b")
    wait_until_made()


def test_threads_that_meet_at_once_share_what_is_made_ahead() -> None:
    """Else the threads of one of them would be nobody's, and never end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    callers = 8
    together = threading.Barrier(callers)

    def take() -> None:
        together.wait()
        with meet.connection() as connection:
            connection.check(["a"])

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
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=4)  # a busy machine meets in it
    meet_alone(meet, "one")
    proxy.deafen()
    error, seconds = error_of(lambda: meet_in_vain(meet, "two"))
    assert isinstance(error, GroupError) and "4 s (health.collective_timeout_s)" in str(error)
    assert seconds < 3 * 4


def test_a_call_is_heard_while_the_store_answers_no_more(proxy: DeafProxy) -> None:
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=600)
    meet_alone(meet, "one")
    proxy.deafen()
    called = threading.Event()
    threading.Timer(0.5, called.set).start()
    waiting: set[threading.Thread] = set()

    def leave_now() -> bool:
        waiting.update(threads_aside())
        return called.is_set()

    error, seconds = error_of(lambda: meet_in_vain(meet, "two", leave_now))
    assert isinstance(error, GroupError) and str(error) == LEFT
    assert called.is_set() and seconds < 5
    assert waiting, "it waited for the answer"
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "its connection was shut down"


def test_a_connection_that_is_never_answered_is_given_up_for_another(
    proxy: DeafProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch waits in the constructor for an answer, whatever the timeout."""
    monkeypatch.setattr(rendezvous, "_TRY_S", 0.5)
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=PATIENCE_S)
    proxy.deafen()
    with pytest.raises(GroupError, match=LEFT):
        meet_in_vain(meet, "one", lambda: proxy.swallowed >= 3)
    proxy.hear()
    meet_alone(meet, "two")
    close_connections()
    assert not connecting() and not threads_aside()


def test_a_connection_that_has_died_since_it_was_made_is_passed_over(proxy: DeafProxy) -> None:
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=60)
    meet_alone(meet, "one")
    wait_until_made()
    before = towards(proxy.port)
    proxy.drop()
    while not all(Connections([inode]).lost() for inode in before):
        time.sleep(0.01)
    meet_alone(meet, "two")


def test_the_kernel_watches_every_connection(proxy: DeafProxy) -> None:
    meet = Rendezvous(host="127.0.0.1", port=proxy.port, timeout_s=60, silent_s=12)
    meet_alone(meet, "one")
    wait_until_made()
    option, found = socket.IPPROTO_TCP, []
    for connection in connections_to(proxy.port):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s = connection.getsockopt(option, socket.TCP_KEEPIDLE)
        found.append((idle_s, connection.getsockopt(option, socket.TCP_USER_TIMEOUT)))
        connection.close()
    assert found == [(4, 12_000)] * 2


def established_to(port: int) -> int:
    wait_until_made()
    return sum(not Connections([inode]).lost() for inode in towards(port))


def regroup_and_count(rank: int, port: int) -> None:
    """A replica, three generations of it and its peer, the last with a heal."""
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=PATIENCE_S)
    make_replica_group(meet, f"replica/{rank}", rank=0, dims=ParallelDims(), device="cpu")
    counts = [established_to(port)]
    for generation in range(3):
        cross = make_cross_groups(
            meet, f"cross/{generation}/0", rank=rank, size=2, device="cpu", leave_now=bool
        )
        counts.append(established_to(port))
    heal = Meeting(rendezvous=meet, prefix="heal/2/0/0", secret=b"of the run")
    if rank == 0:
        heal.tell([("127.0.0.1", 1)], bool)
    assert heal.ask(bool) == [("127.0.0.1", 1)]
    counts.append(established_to(port))
    with pytest.raises(GroupError, match=LEFT):
        meet_in_vain(meet, f"left by {rank}", lambda: True)
    counts.append(established_to(port))
    assert counts == [2] * 6 and len(cross) == 2, counts
    leave_replica_group()


def test_a_worker_has_two_connections_through_all_regroups() -> None:
    """At 16,384 workers they all end in one process, which may have 65,536."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(regroup_and_count, args=(store.port,), nprocs=2, start_method="forkserver")


def test_one_that_waits_in_a_connection_does_not_hold_up_the_other() -> None:
    """A newcomer waits for its source's address on its thread while the next roster is joined."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(meet_in_vain, meet, "heal", over.is_set)
        store.wait(["heal/here/count"])
        for number in range(3):
            meet_alone(meet, f"cross {number}")
        assert not waits.done()
        over.set()
        assert str(waits.exception(PATIENCE_S)) == LEFT
    wait_until_made()


ALONE = """
mount --make-rprivate / && mount --bind "$0" /etc/resolv.conf
ip link set lo up && ip link add here type veth peer name there
ip addr add 10.77.0.1/24 dev here && ip link set here up && ip link set there up
exec "$@"
"""
"""A command on a machine of its own, whose name server is what `$0` says."""

SERVES = """
import sys
import torch.distributed as dist
store = dist.TCPStore("10.77.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

MEETS = f"""
import subprocess, sys
from trainer.backend import rendezvous
rendezvous._TRY_S = 0.5
command = [sys.executable, "-c", {SERVES!r}]
server = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True)
meet = rendezvous.Rendezvous(host="10.77.0.1", port=int(server.stdout.readline()), timeout_s=60)
with meet.connection() as store:
    store.set("met", "")
rendezvous.close_connections()
server.communicate()
"""


@pytest.mark.slow
@requires_hosts
def test_a_name_server_that_does_not_answer_costs_no_try(tmp_path: Path) -> None:
    """c10d looks up a name, once in a process, and longer than a try for a connection may take."""
    asked = tmp_path / "resolv.conf"
    asked.write_text("nameserver 10.77.0.2\noptions timeout:1 attempts:1\n")
    command = ["unshare", "-m", "-n", "bash", "-ec", ALONE, str(asked), sys.executable, "-c", MEETS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "hostname of the client socket cannot be retrieved" in done.stderr
    assert "timed out" not in done.stderr
