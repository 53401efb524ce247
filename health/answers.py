"""A question to a running process, which a thread of it answers.

The thread waits in a pipe that others can open under /proc, and writes its answer into memory that
they can open, too, as with the heartbeat. It costs nothing until somebody asks. It needs the
interpreter's lock: a process that holds it in other code does not answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

Doors = tuple[int, int]
"""Descriptors in the process: the pipe that is written to, and the memory with the answers."""

_ANSWER_S = 0.5
_LOOK_S = 0.005
_MOST_BYTES = 16 << 20
_END = b"\n"


def offer_answers(answer: Callable[[], bytes]) -> Doors:
    """Has a thread answer from now on, by what `answer` returns: one line of text."""
    hear, ask = os.pipe2(os.O_CLOEXEC)
    memory = os.memfd_create("elastictrainer-answers")

    def run() -> None:
        while os.read(hear, 1):
            try:
                said = answer()
            except Exception as error:
                said = f"{type(error).__name__}: {error}".replace("\n", " ").encode()
            if os.fstat(memory).st_size > _MOST_BYTES:
                os.ftruncate(memory, 0)
            os.pwrite(memory, said + _END, os.fstat(memory).st_size)

    threading.Thread(target=run, name="answers", daemon=True).start()
    return ask, memory


def ask_process(pid: int, doors: Doors) -> str:
    """The answer of process `pid`, which has called `offer_answers`; empty where none comes within
    `_ANSWER_S`."""
    try:
        with (
            open(f"/proc/{pid}/fd/{doors[0]}", "wb", buffering=0) as pipe,
            open(f"/proc/{pid}/fd/{doors[1]}", "rb", buffering=0) as memory,
        ):
            begin = os.fstat(memory.fileno()).st_size
            pipe.write(b"?")
            return _await(memory.fileno(), begin)
    except OSError:
        return ""


def _await(memory: int, begin: int) -> str:
    end_s = time.monotonic() + _ANSWER_S
    while time.monotonic() < end_s:
        size = os.fstat(memory).st_size
        if size < begin:  # it has begun anew
            begin = 0
        if size > begin and os.pread(memory, 1, size - 1) == _END:
            return os.pread(memory, size - begin - 1, begin).decode(errors="replace")
        time.sleep(_LOOK_S)
    return ""
