"""Stacks of a process that is asked from outside, whatever it is at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from health.stacks import offer_stacks, read_kernel_stacks, read_stacks, signal_thread
from tests.support import ROOT

CODE = """
import sys, threading
from tests.unit.health.test_stacks import LOOPS, offer_stacks
print(offer_stacks()[0], flush=True)
LOOPS[sys.argv[1]]()
"""


def loops_forever() -> None:
    while True:
        pass


def holds_the_lock() -> None:
    sum(range(10**13))  # one call into C, which looks at nothing else


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def calls_deep(left: int = 60) -> int:
    return calls_deep(left - 1) if left else sum(range(50))


def has_busy_threads() -> None:
    def busy() -> None:
        while True:
            calls_deep()

    for _ in range(3):
        threading.Thread(target=busy).start()
    busy()


LOOPS = {
    loop.__name__: loop for loop in (loops_forever, holds_the_lock, is_stopped, has_busy_threads)
}


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
    started = subprocess.Popen(
        [sys.executable, "-c", CODE, request.param], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    fd = int(started.stdout.readline())
    yield started, fd
    started.kill()
    started.communicate()


@pytest.mark.parametrize("process", ["loops_forever", "holds_the_lock"], indirect=True)
def test_it_answers_from_a_loop_and_with_the_lock_held(
    process: tuple[subprocess.Popen[str], int], request: pytest.FixtureRequest
) -> None:
    started, fd = process
    doing = request.node.callspec.params["process"]
    while f"in {doing}" not in (text := read_stacks(started.pid, (fd, started.pid))):
        assert started.poll() is None, text
    again = read_stacks(started.pid, (fd, started.pid))
    assert again.count(f"in {doing}") == 1, "the answer to this question alone"


@pytest.mark.parametrize("process", ["has_busy_threads"], indirect=True)
def test_a_look_harms_no_process_whose_threads_are_busy(
    process: tuple[subprocess.Popen[str], int],
) -> None:
    """A worker that is asked may only be slow. It was ended by every third look."""
    started, fd = process
    for _ in range(30):
        text = read_stacks(started.pid, (fd, started.pid))
        assert started.poll() is None
        assert text.count("most recent call first") == 1


def test_a_thread_that_is_asked_answers_for_itself() -> None:
    text = read_stacks(os.getpid(), offer_stacks())
    assert "test_a_thread_that_is_asked" in text
    with pytest.raises(ProcessLookupError):
        signal_thread(os.getpid(), 1 << 22, signal.SIGTERM)


@pytest.mark.parametrize("process", ["is_stopped"], indirect=True)
def test_of_one_that_is_stopped_the_kernel_tells(
    process: tuple[subprocess.Popen[str], int],
) -> None:
    started, fd = process
    while ": T " not in (kernel := read_kernel_stacks(started.pid)):
        assert started.poll() is None, kernel
    assert "did not write" in read_stacks(started.pid, (fd, started.pid))


def test_of_one_that_is_gone_nothing() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert "cannot be read" in read_stacks(gone.pid, (3, gone.pid))
    assert read_kernel_stacks(gone.pid) == "Threads, by the kernel:\n"


def test_the_handler_is_there_for_the_next_question_too() -> None:
    offer = offer_stacks()
    for _ in range(2):
        text = read_stacks(os.getpid(), offer)
        assert "test_the_handler_is_there" in text


def test_answers_are_not_kept_for_ever() -> None:
    """A worker that is asked each minute for a month would run out of memory."""
    fd, _ = offer = offer_stacks()
    os.write(fd, b"an answer of before\n" * 100_000)
    for _ in range(2):
        text = read_stacks(os.getpid(), offer)
        assert "test_answers_are_not_kept" in text and "of before" not in text
    assert os.fstat(fd).st_size < 2 * 200_000
