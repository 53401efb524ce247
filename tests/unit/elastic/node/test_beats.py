"""Beats over real sockets on the loopback interface."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from elastic.coordinator.listening import open_beats
from elastic.node.beats import MOST_PACES, BeatListener, BeatSender, Heard, Paces, name_of
from health.pace import Pace

HOST = "127.0.0.1"
DEADLINE_S = 20.0


class Coordinator:
    """Renews the leases of `kept`, has written off those of `gone`, and knows nobody else."""

    def __init__(self, *, kept: str = "", gone: str = "") -> None:
        self.leases = {kept: True, gone: False}
        self.tokens = {name_of(token): token for token in self.leases}
        self.heard: list[str] = []
        self.paces: list[tuple[str, Paces]] = []

    def paced(self, token: str, paces: Paces) -> None:
        self.paces.append((token, paces))

    def renew(self, token: str) -> bool:
        self.heard.append(token)
        return self.leases[token]

    def play(self, agent: Callable[[tuple[str, int]], Awaitable[None]]) -> None:
        """Runs `agent` beside it."""

        async def both() -> None:
            listening = open_beats(HOST)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_datagram_endpoint(
                lambda: BeatListener(self.tokens, self.renew, self.paced), sock=listening
            )
            with closing(transport):
                await asyncio.wait_for(agent(listening.getsockname()), DEADLINE_S)

        asyncio.run(both())


def no_paces(token: str, paces: Paces) -> None:
    raise AssertionError("nobody has told any")


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


@pytest.mark.parametrize("witnesses", [(), (("10.0.0.7", 7001),), (("fd00::7", 1), ("fd00::8", 2))])
def test_an_answer_names_who_may_be_asked_and_a_beat_where_its_agent_answers(
    witnesses: tuple[tuple[str, int], ...],
) -> None:
    met: list[tuple[str, tuple[str, int]]] = []

    def meet(token: str, door: tuple[str, int]) -> tuple[tuple[str, int], ...]:
        met.append((token, door))
        return witnesses

    with socket.socket(type=socket.SOCK_DGRAM) as coordinator:
        coordinator.bind((HOST, 0))
        coordinator.settimeout(DEADLINE_S)
        tokens = {name_of(token): token for token in ("one", "two")}
        listener = BeatListener(tokens, lambda token: token == "one", no_paces, meet)
        listener.connection_made(Answering(coordinator))
        for token in ("one", "two"):
            with closing(BeatSender(coordinator.getsockname(), token, port=7777)) as sender:
                sender.send(1.0)
                listener.datagram_received(*coordinator.recvfrom(1000))
                heard = heard_now(sender)
                assert heard.witnesses == (witnesses if token == "one" else ())
                assert 0 <= heard.ago_s < DEADLINE_S
    assert met == [("one", (HOST, 7777))], "and nobody who was written off"


def beats_of(token: str, count: int) -> list[bytes]:
    """What an agent sends."""
    with socket.socket(type=socket.SOCK_DGRAM) as spy:
        spy.bind((HOST, 0))
        spy.settimeout(DEADLINE_S)
        with sending(spy.getsockname(), token) as sender:
            for number in range(count):
                sender.send(float(number))
            return [spy.recv(1000) for _ in range(count)]


def flipped(data: bytes, at: int) -> bytes:
    """`data` with another bit at one place."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_what_is_no_beat_or_not_signed_by_an_agent_is_passed_by() -> None:
    coordinator = Coordinator(kept="one")
    (beat,) = beats_of("one", 1)
    (stranger_s,) = beats_of("two", 1)
    assert b"one" not in beat

    async def agent(address: tuple[str, int]) -> None:
        with socket.socket(type=socket.SOCK_DGRAM) as stranger:
            stranger.connect(address)
            stranger.setblocking(False)
            for datagram in (b"", os.urandom(62), beat + b"x", beat[:-1], b"ETa2" + beat[4:]):
                stranger.send(datagram)
            for at in (0, 4, 20, 27, 28, 59):  # mark, name, number, signature
                stranger.send(flipped(beat, at))
            stranger.send(stranger_s)
            stranger.send(beat[:20] + stranger_s[20:])  # signed with another token
            with sending(address, "one") as sender:
                sender.send(1.0)
                assert (await heard_by(sender)).kept, "the listener goes on"
            with pytest.raises(BlockingIOError):
                stranger.recv(1000)

    coordinator.play(agent)
    assert coordinator.heard == ["one"], "the good beat alone"


def test_a_beat_counts_once_and_none_counts_after_a_later_one() -> None:
    """Else whoever reads the network could keep the lease of a node that is lost."""
    coordinator = Coordinator(kept="one")
    first, second, third = beats_of("one", 3)
    listener = BeatListener(coordinator.tokens, coordinator.renew, no_paces)
    with socket.socket(type=socket.SOCK_DGRAM) as answers:
        answers.bind((HOST, 0))
        answers.setblocking(False)
        listener.connection_made(Answering(answers))
        for beat in (second, second, first, third, second, third):
            listener.datagram_received(beat, answers.getsockname())
        assert len([answers.recv(1000) for _ in range(2)]) == 2
        with pytest.raises(BlockingIOError):
            answers.recv(1000)
    assert coordinator.heard == ["one", "one"]


def test_beats_without_an_answer_are_counted_until_a_later_one_has_one() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as coordinator:
        coordinator.bind((HOST, 0))
        coordinator.settimeout(DEADLINE_S)
        with sending(coordinator.getsockname(), "one") as sender:
            for now_s in (1.0, 2.0, 3.0):
                sender.send(now_s)
            beats = [coordinator.recvfrom(1000) for _ in range(3)]
            assert sender.unanswered == 3 and sender.hear() is None
            listener = BeatListener({name_of("one"): "one"}, lambda token: True, no_paces)
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
    """It would end the node's workers."""
    with socket.socket(type=socket.SOCK_DGRAM) as forger:
        forger.bind((HOST, 0))
        forger.settimeout(DEADLINE_S)
        listener = BeatListener({name_of("one"): "one"}, lambda token: True, no_paces)
        listener.connection_made(Answering(forger))
        with sending(forger.getsockname(), "one") as sender:
            sender.send(1.0)
            beat, sender_address = forger.recvfrom(1000)
            listener.datagram_received(beat, forger.getsockname())
            genuine = forger.recv(1000)
            forged = [flipped(genuine, at) for at in (0, 4, 27, 28, 29, 60)]  # 28: kept
            for answer in (*forged, b"ETa2" + beat[4:28] + b"\0" + beat[28:], beat, b""):
                forger.sendto(answer, sender_address)
            assert sender.hear() is None and sender.unanswered == 1
            for _ in range(2):
                forger.sendto(genuine, sender_address)
            assert sender.hear() == Heard(sent_s=1.0, kept=True) and sender.unanswered == 0
            forger.sendto(genuine, sender_address)
            assert sender.hear() is None, "each answer counts once"


def test_nobody_at_the_address_is_no_error() -> None:
    with open_beats(HOST) as closed:
        address = closed.getsockname()
    with sending(address, "one") as sender:
        for now_s in range(100):
            sender.send(float(now_s))
            assert sender.hear() is None
        assert 5 < sender.unanswered < 100, "what cannot count any more is forgotten"


def pace(number: int) -> Pace:
    """Figures that 32 bits hold exactly."""
    return Pace(
        number=number,
        step_s=1.5,
        micro_batches=2.0,
        tokens=2048.0,
        data_s=0.25,
        read_s=0.75,
        compute_s=0.5,
        optimizer_s=0.125,
    )


@pytest.mark.parametrize("count", [1, MOST_PACES, MOST_PACES + 1, 60])
def test_a_beat_carries_the_paces_of_the_workers_who_take_turns_where_they_are_many(
    count: int,
) -> None:
    coordinator = Coordinator(kept="one")
    sent = {1000 + index: pace(index + 1) for index in range(count)}
    turns = -(-count // MOST_PACES)

    async def agent(address: tuple[str, int]) -> None:
        with sending(address, "one") as sender:
            for _ in range(turns):
                sender.send(1.0, sent)
                assert (await heard_by(sender)).kept

    coordinator.play(agent)
    told = [paces for token, paces in coordinator.paces if token == "one"]
    assert len(told) == turns and all(len(paces) <= MOST_PACES for paces in told)
    assert {pid: one for paces in told for pid, one in paces.items()} == sent


def test_paces_that_are_not_signed_or_cut_off_are_passed_by_with_their_beat() -> None:
    coordinator = Coordinator(kept="one")
    with socket.socket(type=socket.SOCK_DGRAM) as spy:
        spy.bind((HOST, 0))
        spy.settimeout(DEADLINE_S)
        with sending(spy.getsockname(), "one") as sender:
            sender.send(1.0, {7: pace(1), 8: pace(2)})
            beat = spy.recv(2000)
        assert len(beat) < 1000, "larger packets may not pass"
        listener = BeatListener(coordinator.tokens, coordinator.renew, coordinator.paced)
        listener.connection_made(Answering(spy))
        cut = beat[:-40] + beat[-32:]
        for datagram in (flipped(beat, 30), cut, beat[:60], beat[:28] + beat[64:], b""):
            listener.datagram_received(datagram, spy.getsockname())
        assert coordinator.heard == [] == coordinator.paces
        listener.datagram_received(beat, spy.getsockname())
        assert coordinator.paces == [("one", {7: pace(1), 8: pace(2)})]


def test_what_an_agent_that_was_written_off_tells_does_not_count() -> None:
    coordinator = Coordinator(gone="two")

    async def agent(address: tuple[str, int]) -> None:
        with sending(address, "two") as sender:
            sender.send(1.0, {7: pace(1)})
            assert not (await heard_by(sender)).kept

    coordinator.play(agent)
    assert coordinator.paces == []
