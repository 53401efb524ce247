"""A process that answers, one that cannot, and one that is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from health.answers import ask_process, offer_answers
from tests.support import ROOT

PROGRAM = """
import sys
from health.answers import offer_answers
said = 0
def answer():
    global said
    said += 1
    if said == 3:
        raise ValueError("no more")
    return b"answer %d " % said + b"x" * 300_000
print(*offer_answers(answer), flush=True)
for line in sys.stdin:
    pass
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    one = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]
    yield one
    one.kill()
    one.wait()


def test_each_question_has_its_answer(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    ask, memory = map(int, process.stdout.readline().split())
    doors = ask, memory
    first = ask_process(process.pid, doors)
    assert first.startswith("answer 1 ") and len(first) == 300_009
    assert ask_process(process.pid, doors).startswith("answer 2 ")
    assert ask_process(process.pid, doors) == "ValueError: no more"
    process.kill()
    process.wait()
    assert ask_process(process.pid, doors) == ""


def test_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from health import answers

    monkeypatch.setattr(answers, "_MOST_BYTES", 25)
    doors = offer_answers(lambda: b"0123456789")
    for _ in range(4):
        assert ask_process(os.getpid(), doors) == "0123456789"
    assert os.fstat(doors[1]).st_size == 11


def test_who_holds_the_lock_does_not_answer() -> None:
    """As a process that is stopped: it has the pipe, and nobody reads it."""
    import os

    hear, ask = os.pipe()
    assert ask_process(os.getpid(), (ask, os.memfd_create("nothing"))) == ""
    os.close(hear)
    os.close(ask)
