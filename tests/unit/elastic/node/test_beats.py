"""Beats over real sockets on the loopback interface."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from elastic.node.beats import BeatListener, BeatSender, Heard, key_of, open_socket

HOST = "127.0.0.1"
DEADLINE_S = 20.0


class Coordinator:
    """Renews the leases of `kept`, has written off those of `gone`, and knows nobody else."""

    def __init__(self, *, kept: str = "", gone: str = "") -> None:
        self.answers = {key_of(kept): True, key_of(gone): False}
        self.heard: list[bytes] = []

    def renew(self, key: bytes) -> bool | None:
        self.heard.append(key)
        return self.answers.get(key)

    def play(self, agent: Callable[[tuple[str, int]], Awaitable[None]]) -> None:
        """Runs `agent` beside it."""

        async def both() -> None:
            listening = open_socket(HOST)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_datagram_endpoint(
                lambda: BeatListener(self.renew), sock=listening
            )
            with closing(transport):
                await asyncio.wait_for(agent(listening.getsockname()), DEADLINE_S)

        asyncio.run(both())


async def heard_by(sender: BeatSender) -> Heard:
    while (heard := sender.hear()) is None:
        await asyncio.sleep(0)
    return heard


@contextmanager
def sending(address: tuple[str, int], token: str) -> Iterator[BeatSender]:
    with closing(BeatSender(address, token)) as sender:
        yield sender


@pytest.mark.parametrize(("token", "kept"), [("one", True), ("two", False)])
def test_a_beat_is_answered_by_what_became_of_the_lease(token: str, kept: bool) -> None:
    async def agent(address: tuple[str, int]) -> None:
        with sending(address, token) as sender:
            for now_s in (3.0, 4.0):
                sender.send(now_s)
                assert await heard_by(sender) == Heard(sent_s=now_s, kept=kept)
                assert sender.unanswered == 0 and sender.hear() is None

    Coordinator(kept="one", gone="two").play(agent)


def test_what_is_no_beat_or_of_a_stranger_is_passed_by() -> None:
    coordinator = Coordinator(kept="one")
    with socket.socket(type=socket.SOCK_DGRAM) as spy:
        spy.bind((HOST, 0))
        spy.settimeout(DEADLINE_S)
        with sending(spy.getsockname(), "one") as sender:
            sender.send(0.0)
            beat = spy.recv(1000)

    async def agent(address: tuple[str, int]) -> None:
        with socket.socket(type=socket.SOCK_DGRAM) as stranger:
            stranger.connect(address)
            stranger.setblocking(False)
            for datagram in (b"", os.urandom(44), beat + b"x", beat[:-1], b"ETa1" + beat[4:]):
                stranger.send(datagram)
            stranger.send(beat[:-1] + bytes([beat[-1] ^ 1]))  # another key
            with sending(address, "one") as sender:
                sender.send(1.0)
                assert (await heard_by(sender)).kept, "the listener goes on"
            with pytest.raises(BlockingIOError):
                stranger.recv(1000)

    coordinator.play(agent)
    assert len(coordinator.heard) == 2, "the other key, and the good beat"


def test_beats_without_an_answer_are_counted_until_a_later_one_has_one() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as coordinator:
        coordinator.bind((HOST, 0))
        coordinator.settimeout(DEADLINE_S)
        with sending(coordinator.getsockname(), "one") as sender:
            for now_s in (1.0, 2.0, 3.0):
                sender.send(now_s)
            beats = [coordinator.recvfrom(1000) for _ in range(3)]
            assert sender.unanswered == 3 and sender.hear() is None
            listener = BeatListener(lambda key: True)
            listener.connection_made(Answering(coordinator))
            listener.datagram_received(*beats[1])  # the first is lost, the third still on its way
            assert heard_now(sender) == Heard(sent_s=2.0, kept=True)
            assert sender.unanswered == 1
            listener.datagram_received(*beats[0])
            listener.datagram_received(*beats[2])
            assert heard_now(sender) == Heard(sent_s=3.0, kept=True), "an old answer says nothing"


class Answering(asyncio.DatagramTransport):
    def __init__(self, through: socket.socket) -> None:
        self.through = through

    def sendto(self, data: Any, addr: Any = None) -> None:
        self.through.sendto(data, addr)


def heard_now(sender: BeatSender) -> Heard:
    """On the loopback interface, what was sent is there."""
    heard = sender.hear()
    assert heard is not None
    return heard


def test_a_forged_answer_says_nothing() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as forger:
        forger.bind((HOST, 0))
        forger.settimeout(DEADLINE_S)
        with sending(forger.getsockname(), "one") as sender:
            sender.send(1.0)
            beat, sender_address = forger.recvfrom(1000)
            number = beat[4:12]
            for answer in (
                b"ETa1" + number + key_of("two") + b"\0",
                b"ETa1" + bytes(8) + key_of("one") + b"\0",
                b"ETb1" + number + key_of("one") + b"\0",
                b"",
            ):
                forger.sendto(answer, sender_address)
            assert sender.hear() is None and sender.unanswered == 1


def test_nobody_at_the_address_is_no_error() -> None:
    with open_socket(HOST) as closed:
        address = closed.getsockname()
    with sending(address, "one") as sender:
        for now_s in range(100):
            sender.send(float(now_s))
            assert sender.hear() is None
        assert 5 < sender.unanswered < 100, "what cannot count any more is forgotten"


def test_the_coordinator_listens_on_its_address_or_where_it_has_none_such_on_all() -> None:
    with open_socket(HOST) as here, open_socket("192.0.2.1") as elsewhere:
        assert here.getsockname()[0] == HOST
        assert elsewhere.getsockname()[0] == "0.0.0.0"
