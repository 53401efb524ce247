"""Agents ask each other whether they hear the coordinator, over real sockets on the loopback
interface."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.node.witnesses import WitnessStand, ask
from trainer.backend.link_exchange import Address

SECRET, HOST = "of the agents", "127.0.0.1"
BOUND_S, LONG_S = 0.5, 60.0


@contextlib.contextmanager
def witness(silent_s: float, *, secret: str = SECRET, late_s: float = 0.0) -> Iterator[Address]:
    """One that answers, `late_s` from now on. Yields where."""
    over = threading.Event()

    def answer(stand: WitnessStand) -> None:
        over.wait(late_s)
        while not over.wait(0.01):
            stand.answer(silent_s)

    with contextlib.closing(WitnessStand((HOST, 1), secret)) as stand:
        thread = threading.Thread(target=answer, args=(stand,))
        thread.start()
        try:
            yield HOST, stand.port
        finally:
            over.set()
            thread.join()


def test_all_are_heard_and_nobody_waits_for_the_bound() -> None:
    began = time.monotonic()
    with witness(1.5) as one, witness(7.25, late_s=0.3) as other:
        assert sorted(ask([one, other], SECRET, LONG_S)) == [1.5, 7.25]
    assert time.monotonic() - began < LONG_S / 2


def test_who_says_nothing_is_waited_for_up_to_the_bound() -> None:
    began = time.monotonic()
    with contextlib.closing(WitnessStand((HOST, 1), SECRET)) as mute, witness(1.5) as other:
        assert ask([(HOST, mute.port), other], SECRET, BOUND_S) == [1.5]
        assert ask([], SECRET, LONG_S) == []
    assert BOUND_S <= time.monotonic() - began < LONG_S / 2


def test_who_does_not_know_the_secret_bears_no_witness_and_is_told_nothing() -> None:
    with witness(1.5, secret="another") as stranger:
        assert ask([stranger], SECRET, BOUND_S) == []
    with witness(1.5) as one:
        assert ask([one], "another", BOUND_S) == []


def bound() -> socket.socket:
    found = socket.socket(type=socket.SOCK_DGRAM)
    found.bind((HOST, 0))
    found.settimeout(LONG_S)
    return found


def test_an_answer_counts_for_its_question_alone_and_once() -> None:
    """Else whoever has heard one could keep alive a node that is cut off."""
    with bound() as forger, bound() as later, witness(1.5) as one, ThreadPoolExecutor(1) as pool:
        asked = [forger.getsockname()] * 2
        asking = pool.submit(ask, asked, SECRET, BOUND_S)
        question, asker = forger.recvfrom(1000)
        later.sendto(question, one)
        answer = later.recv(1000)
        for data in (b"", question, answer[:-1], answer, answer, answer):
            forger.sendto(data, asker)
        assert asking.result() == [1.5], "of two"
        asking = pool.submit(ask, [later.getsockname()], SECRET, BOUND_S)
        _, asker = later.recvfrom(1000)
        later.sendto(answer, asker)
        assert asking.result() == []


@pytest.mark.parametrize("at", [0, 4, 19, 20, 51])
def test_a_question_that_was_altered_is_not_answered(at: int) -> None:
    with bound() as spy, bound() as mailbox, witness(1.5) as one:
        ask([spy.getsockname()], SECRET, 0.01)
        question = spy.recv(1000)
        altered = question[:at] + bytes([question[at] ^ 1]) + question[at + 1 :]
        for data in (altered, question + b"x", question[:-1], b"", question):
            mailbox.sendto(data, one)
        assert mailbox.recv(1000)[4:20] == question[4:20]
        mailbox.settimeout(0.1)
        with pytest.raises(TimeoutError):
            mailbox.recv(1000)
