"""Agents of other nodes say whether they hear the coordinator, where this one does not: is this
node cut off, or is the coordinator's machine gone (`decide_gone`)?

    question: "ETq1", nonce (16 bytes), signature (32)
    answer:   "ETw1", nonce, seconds since the coordinator was heard (8), signature

Each is a datagram, so there is nothing that a stranger could hold open. Both sides sign
(HMAC-SHA256) with a secret that the agents of one coordinator have in common; a nonce is new for
each question, so an answer counts once and for this question alone. What is not signed is passed
by, without an answer.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from elastic.node.beats import SIGNATURE_BYTES, is_genuine, signed
from trainer.backend.interface import own_address
from trainer.backend.link_exchange import Address

_QUESTION = struct.Struct("!4s16s")
_ANSWER = struct.Struct("!4s16sd")
_QUESTION_MARK, _ANSWER_MARK = b"ETq1", b"ETw1"
_QUESTION_BYTES, _ANSWER_BYTES = _QUESTION.size + SIGNATURE_BYTES, _ANSWER.size + SIGNATURE_BYTES

_MOST_AT_ONCE = 256
"""Datagrams that are looked at before the agent does something else."""
_AGAIN_S = 0.2
"""A question without an answer is asked again so soon: either may have been lost."""


class WitnessStand:
    """An agent's end that answers. No method waits.

    Args:
        towards: where the coordinator listens: this listens on the interface on the way there.
        secret: of the agents.
    """

    def __init__(self, towards: Address, secret: str) -> None:
        family = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0][0]
        self._secret, self._socket = secret, socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind((own_address(*towards), 0))
        except OSError:  # no way there: nobody is told of this port either
            self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]
        """Where others ask."""

    def answer(self, silent_s: float) -> None:
        """Answers the questions that have come: the coordinator was heard `silent_s` ago."""
        with contextlib.suppress(OSError):  # there is no more
            for _ in range(_MOST_AT_ONCE):
                data, asker = self._socket.recvfrom(_QUESTION_BYTES + 1)
                if len(data) != _QUESTION_BYTES or not is_genuine(data, self._secret):
                    continue
                mark, nonce = _QUESTION.unpack_from(data)
                if mark == _QUESTION_MARK:
                    answer = _ANSWER.pack(_ANSWER_MARK, nonce, silent_s)
                    with contextlib.suppress(OSError):  # as good as lost on the way
                        self._socket.sendto(signed(answer, self._secret), asker)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def ask(witnesses: Sequence[Address], secret: str, bound_s: float) -> list[float]:
    """Asks agents of other nodes, all at once, and waits until all have answered or `bound_s` is
    over.

    Returns:
        Of each that has answered, how many seconds ago it heard the coordinator.
    """
    if not witnesses:
        return []
    deadline = time.monotonic() + bound_s
    open_ = {secrets.token_bytes(16): address for address in witnesses}
    said: list[float] = []
    family = socket.AF_INET6 if ":" in witnesses[0][0] else socket.AF_INET  # one for all of them
    with socket.socket(family, socket.SOCK_DGRAM) as mailbox:
        while open_ and time.monotonic() < deadline:
            for nonce, address in open_.items():
                with contextlib.suppress(OSError):  # no way there
                    question = _QUESTION.pack(_QUESTION_MARK, nonce)
                    mailbox.sendto(signed(question, secret), address)
            again_s = min(time.monotonic() + _AGAIN_S, deadline)
            while open_ and (answer := _hear(mailbox, secret, again_s)) is not None:
                nonce, silent_s = answer
                if open_.pop(nonce, None) is not None:
                    said.append(silent_s)
    return said


def _hear(mailbox: socket.socket, secret: str, until_s: float) -> tuple[bytes, float] | None:
    """The next answer, as nonce and seconds; None where none comes in time."""
    while (left_s := until_s - time.monotonic()) > 0:
        mailbox.settimeout(left_s)
        with contextlib.suppress(OSError):  # nothing came
            data = mailbox.recv(_ANSWER_BYTES + 1)
            if len(data) == _ANSWER_BYTES and is_genuine(data, secret):
                mark, nonce, silent_s = _ANSWER.unpack_from(data)
                if mark == _ANSWER_MARK:
                    return nonce, silent_s
    return None
