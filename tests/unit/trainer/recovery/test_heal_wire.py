"""A heal over connections that fail, lie, stand still or belong to somebody else."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from tests.support.bent_proxy import Bend, BentProxy
from tests.support.healing import (
    DEADLINE_S,
    STATE_BYTES,
    failure_of,
    make_engine,
    make_mesh,
    meeting_at,
    slowly,
    step_both,
    wait_until,
)
from trainer.backend.interface import GLOO_VARIABLE, interface_of, own_address
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.errors import GroupError, HealError
from trainer.parallel.mesh import ReplicaMesh
from trainer.recovery import heal_source, heal_wire, state_blocks
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import (
    Facts,
    Meeting,
    Pace,
    Place,
    Sockets,
    Stream,
    enter,
    receive_block,
    send_block,
    welcome,
)
from trainer.recovery.staging import Stage
from trainer.recovery.state_blocks import Block, cut

Pair = tuple[Rendezvous, Engine, Engine]

BLOCK = 16
"""Bytes of a block: six of them, over four streams."""
SOON_S = 5.0
"""Far less than any bound in here."""

FULL_BYTES = 32 << 20
"""More than the kernel keeps of a connection that nobody reads."""
SILENT_S = 1.0

PROOFS = 32 + 24 + 32
"""Bytes that a source sends before the first block: challenge, facts, proof."""
HEADER = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_blocks, "BLOCK_BYTES", BLOCK)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """The threads of a heal end by themselves and close their sockets."""
    yield
    wait_until(lambda: not any(t.name.startswith("heal-") for t in threading.enumerate()))


def ends_well(source: Source, newcomer: Newcomer, giver: Engine, taker: Engine) -> bool:
    """Ends a heal when all has come: whether it has brought the same bits."""
    wait_until(newcomer.finish)
    source.close()
    newcomer.close()
    return taker.state.digest() == giver.state.digest()


def heals(meet: Rendezvous, giver: Engine, taker: Engine, prefix: str) -> bool:
    """Whether a heal brings the same bits, with a step meanwhile."""
    meeting = meeting_at(meet, prefix)
    source, newcomer = Source(giver, 0, meeting), Newcomer(taker, meeting, clip_norm=0.5)
    source.await_copy()
    step_both(giver, newcomer, taker, 0)
    return ends_well(source, newcomer, giver, taker)


# -- bytes that are altered on the way -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bent(Meeting):
    """A meeting whose newcomers reach the source through a proxy."""

    bend: Bend
    """What it does."""
    proxies: contextlib.ExitStack
    """Ends it."""

    def tell(self, places: Sequence[Place], leave_now: Callable[[], bool]) -> None:
        ((_, port),) = places
        proxy = self.proxies.enter_context(BentProxy(port, self.bend))
        super().tell([("127.0.0.1", proxy.port)], leave_now)


def flip(place: int) -> Bend:
    def bend(at: int, data: bytearray) -> None:
        if at <= place < at + len(data):
            data[place - at] ^= 1

    return bend


def cut_at(place: int) -> Bend:
    def bend(at: int, data: bytearray) -> None:
        if at + len(data) > place:
            raise ConnectionAbortedError

    return bend


BENT = {
    "a bit of the state": (flip(PROOFS + HEADER + 3), "have the CRC-32"),
    "its position": (flip(PROOFS + 3), "of the state came instead of"),
    "its length": (flip(PROOFS + 11), "of the state came instead of"),
    "its CRC-32": (flip(PROOFS + HEADER - 1), "have the CRC-32"),
    "what the source says of it": (flip(32 + 15), "has not this run's secret"),
    "the source's challenge": (flip(3), "closed the connection|Connection reset"),
    "the connection is cut": (
        cut_at(PROOFS + HEADER + 1),
        "closed the connection|Connection reset",
    ),
}


@pytest.mark.parametrize("what", BENT)
def test_a_state_that_is_altered_on_the_way_does_not_count(pair: Pair, what: str) -> None:
    meet, giver, taker = pair
    bend, message = BENT[what]
    meeting = meeting_at(meet, "bent")
    with contextlib.ExitStack() as proxies:
        bent = Bent(**{**vars(meeting), "bend": bend, "proxies": proxies})
        source, newcomer = Source(giver, 0, bent), Newcomer(taker, meeting, clip_norm=0.5)
        assert re.search(message, failure_of(newcomer))
        assert not newcomer.finish() and not newcomer.caught_up
        source.close()
        newcomer.close()
    assert heals(meet, giver, taker, "good")


def test_a_proxy_that_alters_nothing_is_not_noticed(pair: Pair) -> None:
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    with contextlib.ExitStack() as proxies:
        bent = Bent(**{**vars(meeting), "bend": lambda at, data: None, "proxies": proxies})
        source, newcomer = Source(giver, 0, bent), Newcomer(taker, meeting, clip_norm=0.5)
        assert ends_well(source, newcomer, giver, taker)


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = stack.enter_context(socket.create_connection(server.getsockname()))
        yield one, stack.enter_context(server.accept()[0])


def test_equal_bytes_in_another_place_have_another_checksum(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    """A block of zeros that was sent for one place does not pass for that of another."""
    data, found = memoryview(bytes(8)), bytearray()
    for position in (0, 8):
        send_block(wire[0], position, data)
        header = wire[1].recv(HEADER, socket.MSG_WAITALL)
        wire[1].recv(8, socket.MSG_WAITALL)
        found += header[12:]
    assert found[:4] != found[4:]


def test_a_block_of_an_unexpected_size_is_refused_before_it_is_read(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    send_block(wire[0], 0, memoryview(bytes(64)))
    with pytest.raises(HealError, match=r"^64 bytes at 0 .* instead of 8 at 0$"):
        receive_block(wire[1], 0, memoryview(bytearray(8)))
    assert len(wire[1].recv(1000)) == 64


def test_a_source_with_another_size_of_state_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    monkeypatch.setattr(giver.state, "frozen", {"more": torch.zeros(2)})
    source, newcomer = Source(giver, 0, meeting), Newcomer(taker, meeting, clip_norm=0.5)
    reason = failure_of(newcomer)
    assert reason == f"the source has {STATE_BYTES + 8} bytes of state, this worker {STATE_BYTES}"
    source.close()
    newcomer.close()


# -- strangers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["source", "newcomer"])
def test_who_has_another_secret_is_no_part_of_a_heal(
    pair: Pair, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    other = replace(meeting, secret=b"of somebody else")
    source = Source(giver, 0, other if wrong == "source" else meeting)
    newcomer = Newcomer(taker, other if wrong == "newcomer" else meeting, clip_norm=0.5)
    reason = failure_of(newcomer)
    assert "closed the connection" in reason or "reset" in reason
    wait_until(lambda: "has not this run's secret" in caplog.text)
    for said in (reason, caplog.text, repr(meeting), repr(other)):
        assert "somebody else" not in said and "of the tests' run" not in said
    source.close()
    newcomer.close()
    assert not newcomer.finish()


def test_a_newcomer_sends_nothing_of_use_to_a_stranger_in_its_sources_place(pair: Pair) -> None:
    """One who answers with the newcomer's own proof, the only one that he has seen."""
    meet, _, taker = pair
    meeting = replace(meeting_at(meet), streams=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting.tell([server.getsockname()], bool)
        newcomer = Newcomer(taker, meeting, clip_norm=0.5)
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(32))
            hello = connection.recv(72, socket.MSG_WAITALL)
            connection.sendall(STATE_BYTES.to_bytes(8, "big") + bytes(16) + hello[-32:])
            assert failure_of(newcomer) == (
                "who listens at the source's address has not this run's secret"
            )
    newcomer.close()


def test_a_proof_of_another_meeting_is_worth_nothing(
    pair: Pair, wire: tuple[socket.socket, socket.socket]
) -> None:
    meeting = meeting_at(pair[0], "heal/2/0/0")
    late = replace(meeting, prefix="heal/1/0/0")

    def try_to_enter() -> None:
        with contextlib.suppress(HealError, OSError):
            enter(wire[0], late, Stream(0, 0))

    thread = threading.Thread(target=try_to_enter)
    thread.start()
    with pytest.raises(HealError, match="proof is wrong"):
        welcome(wire[1], meeting, Facts(STATE_BYTES, 0, 0))
    wire[1].close()
    thread.join()


def test_strangers_that_say_nothing_hold_nobody_up(pair: Pair) -> None:
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    source = Source(giver, 0, meeting)
    ((place),) = meeting.ask(bool)
    with contextlib.ExitStack() as strangers:
        for _ in range(8):
            strangers.enter_context(socket.create_connection(place))
        began = time.monotonic()
        newcomer = Newcomer(taker, meeting, clip_norm=0.5)
        assert ends_well(source, newcomer, giver, taker)
        assert time.monotonic() - began < SOON_S
        wait_until(lambda: not any(t.name == "heal-send" for t in threading.enumerate()))


def test_a_stranger_that_speaks_slowly_is_waited_for_no_longer(
    pair: Pair, wire: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heal_wire, "_HELLO_S", 0.5)
    told = threading.Event()

    def speak() -> None:
        while not told.wait(0.1):
            wire[0].sendall(b"?")

    with ThreadPoolExecutor(1) as pool:
        speaks = pool.submit(speak)
        try:
            with pytest.raises(HealError, match=r"did not prove who it is in 0\.5 s"):
                welcome(wire[1], meeting_at(pair[0]), Facts(STATE_BYTES, 0, 0))
        finally:
            told.set()
        speaks.result(DEADLINE_S)


def test_of_many_strangers_the_oldest_are_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal_source, "MOST_STRANGERS", 4)
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    source = Source(giver, 0, meeting)
    ((place),) = meeting.ask(bool)
    with contextlib.ExitStack() as strangers:
        waiting = [
            strangers.enter_context(socket.create_connection(place, timeout=DEADLINE_S))
            for _ in range(4 + meeting.streams + 3)
        ]
        for left in waiting[:3]:
            assert len(left.recv(32, socket.MSG_WAITALL)) == 32 and left.recv(1) == b""
        newcomer = Newcomer(taker, meeting, clip_norm=0.5)
        assert ends_well(source, newcomer, giver, taker)


def test_a_source_without_descriptors_takes_connections_when_it_has_some(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heal_source, "_PAUSE_S", 0.01)
    meet, giver, taker = pair
    meeting = meeting_at(meet)
    source = Source(giver, 0, meeting)
    ((place),) = meeting.ask(bool)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:
        free = os.dup(stranger.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            stranger.connect(place)
            wait_until(lambda: "Too many open files" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        newcomer = Newcomer(taker, meeting, clip_norm=0.5)
        assert ends_well(source, newcomer, giver, taker)


# -- a source that ends, stands still, or is slow --------------------------------------------------


def be_source(port: int, meeting: Meeting) -> None:
    """A process that sends a block for each stream, and the rest much later."""
    state_blocks.BLOCK_BYTES = BLOCK
    giver = make_engine(make_mesh(meeting.rendezvous, "the source's replica"))
    giver.initialize()
    source = Source(giver, 0, slowly(meeting))
    dist.TCPStore("127.0.0.1", port).wait(["never"])
    source.close()


def receive_some(pair: Pair) -> tuple[int, Newcomer]:
    """The process of a source, in the middle of a heal, and its newcomer."""
    meet, _, taker = pair
    meeting = meeting_at(meet, "lost")
    process = multiprocessing.get_context("forkserver").Process(
        target=be_source, args=(meet.port, meeting), daemon=True
    )
    process.start()
    newcomer = Newcomer(taker, meeting, clip_norm=0.5)
    wait_until(lambda: sum(newcomer._received) == BLOCK)
    assert process.pid is not None
    return process.pid, newcomer


def test_the_end_of_its_source_is_noticed_at_once(pair: Pair) -> None:
    pid, newcomer = receive_some(pair)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    reason = failure_of(newcomer)
    assert time.monotonic() - began < SOON_S
    assert "closed the connection" in reason or "reset" in reason
    assert not newcomer.finish()
    newcomer.close()
    assert heals(*pair, "again")


def test_a_source_that_stands_still_holds_up_no_close(pair: Pair) -> None:
    pid, newcomer = receive_some(pair)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    newcomer.close()
    assert time.monotonic() - began < SOON_S and not newcomer.finish()
    os.kill(pid, signal.SIGKILL)
    assert heals(*pair, "again")


def test_whatever_changes_a_source_waits_for_its_copy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet, giver, _ = pair
    opened, copy = threading.Event(), Stage.copy

    def gated(self: Stage, block: Block, into: torch.Tensor) -> None:
        assert opened.wait(DEADLINE_S)
        copy(self, block, into)

    monkeypatch.setattr(Stage, "copy", gated)
    source = Source(giver, 0, meeting_at(meet))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(source.await_copy)
        with pytest.raises(NotYetError):
            waits.result(0.3)
        opened.set()
        waits.result(DEADLINE_S)
    source.close()


def test_a_source_that_cannot_listen_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meet, giver, taker = pair
    meeting = meeting_at(meet)

    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as full:
        full.setattr(socket, "create_server", refuse)
        source, newcomer = Source(giver, 0, meeting), Newcomer(taker, meeting, clip_norm=0.5)
        began = time.monotonic()
        assert "the source cannot listen" in failure_of(newcomer)
        assert time.monotonic() - began < SOON_S
        wait_until(lambda: "Too many open files" in caplog.text)
    source.close()
    newcomer.close()
    assert heals(*pair, "again")


def test_a_heal_goes_over_ipv6_where_the_control_plane_is_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GLOO_VARIABLE, raising=False)
    try:
        store = dist.TCPStore("::1", 0, is_master=True, wait_for_workers=False)
    except RuntimeError:
        pytest.skip("this machine has no IPv6")
    _, giver, taker = pair
    meet = Rendezvous(host="::1", port=store.port, timeout_s=60)
    assert heals(meet, giver, taker, "heal")


def test_a_source_that_takes_no_connection_holds_up_no_close(pair: Pair) -> None:
    meet, _, taker = pair
    meeting = meeting_at(meet)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = server.getsockname()
        with contextlib.suppress(TimeoutError):  # by then its queue is full
            while True:
                stack.enter_context(socket.create_connection(place, timeout=0.5))
        meeting.tell([place], bool)
        newcomer = Newcomer(taker, meeting, clip_norm=0.5)
        wait_until(lambda: len(newcomer._sockets._open) == meeting.streams)
        began = time.monotonic()
        newcomer.close()
        assert time.monotonic() - began < SOON_S


def test_a_source_that_says_nothing_for_long_has_failed(pair: Pair) -> None:
    meet, giver, taker = pair
    slow = slowly(meeting_at(replace(meet, timeout_s=1)))
    source, newcomer = Source(giver, 0, slow), Newcomer(taker, slow, clip_norm=0.5)
    assert failure_of(newcomer) == "nothing came for 1 s"
    source.close()
    newcomer.close()


def test_a_newcomer_that_takes_nothing_for_a_while_is_waited_for(
    pair: Pair, wire: tuple[socket.socket, socket.socket]
) -> None:
    """Longer than a machine may be silent, as while it builds with the interpreter's lock."""
    meeting = meeting_at(replace(pair[0], silent_s=SILENT_S))
    data = memoryview(bytes(FULL_BYTES))
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(enter, wire[1], meeting, Stream(0, 0))
        welcome(wire[0], meeting, Facts(FULL_BYTES, 0, 0))
        entered.result(DEADLINE_S)
        sent = pool.submit(send_block, wire[0], 0, data)
        with pytest.raises(NotYetError):
            sent.result(3 * SILENT_S)
        received = memoryview(bytearray(FULL_BYTES))
        receive_block(wire[1], 0, received)
        sent.result(DEADLINE_S)
    assert received == data


@pytest.mark.parametrize("silent_s", [0.5, 10.0, 1000.0])
def test_a_silent_machine_is_found_on_an_idle_stream(
    pair: Pair, wire: tuple[socket.socket, socket.socket], silent_s: float
) -> None:
    """By probes: nothing else goes from a newcomer to its source."""
    meeting = meeting_at(replace(pair[0], silent_s=silent_s))
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(enter, wire[1], meeting, Stream(0, 0))
        welcome(wire[0], meeting, Facts(0, 0, 0))
        entered.result(DEADLINE_S)
    for end in wire:
        idle_s, every_s, probes = (
            end.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert silent_s <= idle_s + every_s * probes <= max(2.0, 1.2 * silent_s)


def test_a_source_ends_without_its_newcomer(pair: Pair) -> None:
    """In the middle of a block's wait, and with connections that nobody has opened."""
    meet, giver, taker = pair
    slow = replace(slowly(meeting_at(meet)), newcomers=2)
    source, newcomer = Source(giver, 0, slow), Newcomer(taker, slow, clip_norm=0.5)
    source.await_copy()
    wait_until(lambda: sum(newcomer._received) == BLOCK)
    source.close()
    failure_of(newcomer)
    newcomer.close()


def test_a_source_that_is_held_back_takes_its_time_and_sends_the_same_bits(pair: Pair) -> None:
    meet, giver, taker = pair
    meeting = replace(meeting_at(meet), bytes_per_s=2 * STATE_BYTES)
    source, began = Source(giver, 0, meeting), time.monotonic()
    newcomer = Newcomer(taker, meeting, clip_norm=0.5)
    wait_until(newcomer.finish)
    # All but the last block.
    assert time.monotonic() - began >= (STATE_BYTES - BLOCK) / (2 * STATE_BYTES)
    assert taker.state.digest() == giver.state.digest()
    source.close()
    newcomer.close()


# -- several newcomers, several addresses ----------------------------------------------------------


def test_several_newcomers_get_the_same_bits_and_one_that_leaves_costs_the_others_nothing(
    pair: Pair, replica: tuple[Rendezvous, ReplicaMesh]
) -> None:
    meet, giver, taker = pair
    others = [make_engine(replica[1]) for _ in range(2)]
    meeting = replace(meeting_at(meet), newcomers=3)
    source = Source(giver, 0, meeting)
    meeting.ask(bool)  # a process has connections to the store for one newcomer that waits
    leaver, *stayers = (
        Newcomer(engine, meeting, number=number, clip_norm=0.5)
        for number, engine in enumerate([others[0], others[1], taker])
    )
    leaver.close()
    for newcomer in stayers:
        wait_until(newcomer.finish)
        newcomer.close()
    assert others[1].state.digest() == taker.state.digest() == giver.state.digest()
    source.close()


def test_streams_are_dealt_to_all_addresses_of_the_source(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet, giver, taker = pair
    names = [interface_of("127.0.0.1"), interface_of(own_address("203.0.113.7", 1))]
    if None in names or names[0] == names[1]:
        pytest.skip("this machine has one interface with an address")
    monkeypatch.setenv(GLOO_VARIABLE, ",".join(map(str, names)))
    meeting, met = meeting_at(meet), []
    source = Source(giver, 0, meeting)
    connect = socket.socket.connect

    def noting(self: socket.socket, place: Place) -> None:
        met.append(place)
        connect(self, place)

    places = meeting.ask(bool)
    monkeypatch.setattr(socket.socket, "connect", noting)
    newcomer = Newcomer(taker, meeting, clip_norm=0.5)
    assert ends_well(source, newcomer, giver, taker)
    assert sorted(place for place in met if place in places) == sorted(2 * places)
    assert len({host for host, _ in places}) == 2


# -- the parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[], [0], [16], [5, 0, 30, 1, 12], [16, 16], [100]])
def test_blocks_are_the_state_cut_to_size(sizes: list[int]) -> None:
    whole = torch.arange(sum(sizes), dtype=torch.uint8)
    blocks = cut(whole.split(sizes)) if sizes else cut([])
    flat = [torch.cat(block.views) for block in blocks]
    assert [block.position for block in blocks] == list(range(0, len(whole), BLOCK))
    assert [len(part) for part in flat[:-1]] == [BLOCK] * (len(flat) - 1)
    assert [block.size_bytes for block in blocks] == [len(part) for part in flat]
    assert torch.equal(torch.cat([*flat, whole[:0]]), whole)


def test_who_waits_in_a_socket_is_woken_and_later_ones_are_refused() -> None:
    sockets = Sockets()
    server = socket.create_server(("127.0.0.1", 0))
    waiting = threading.Event()

    def accept() -> None:
        with contextlib.suppress(OSError), sockets.holding(server):
            waiting.set()
            server.accept()

    thread = threading.Thread(target=accept)
    thread.start()
    assert waiting.wait(DEADLINE_S)
    sockets.stop()
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and server.fileno() == -1
    with (
        socket.socket() as late,
        pytest.raises(GroupError, match="left for a regroup"),
        sockets.holding(late),
    ):
        raise AssertionError("it was stopped")
    assert late.fileno() == -1


def test_a_pace_is_one_for_all_who_send() -> None:
    sockets = Sockets()
    pace, began = Pace(1000.0, sockets), time.monotonic()
    threads = [threading.Thread(target=pace.wait, args=(100,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.4
