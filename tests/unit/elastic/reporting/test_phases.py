"""What a start shows before there are records: a line a phase, and bars in a terminal."""

from __future__ import annotations

import errno
import io

import pytest

from elastic.reporting.phases import PhasePrinter, format_phase, phases
from trainer.progress import tell


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "no space")


def test_a_log_gets_one_line_a_phase() -> None:
    stream = io.StringIO()
    with phases(stream):
        for done in range(100):
            tell("hashing 3 files", done, 100)
        tell("joining the Ray cluster")
    tell("not shown any more")
    assert stream.getvalue() == "hashing 3 files\njoining the Ray cluster\n"


def test_a_log_says_how_far_a_long_phase_is_once_a_minute() -> None:
    stream, now = io.StringIO(), [0.0]
    printer = PhasePrinter(stream, clock=lambda: now[0])
    for done in range(0, 40, 2):  # of 400, one every 10 seconds
        printer.tell("encoding", done, 400)
        now[0] += 20.0
    printer.tell("joining", 0, 0)
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["encoding", "encoding: 1 %, 1:05:40 left", "encoding: 3 %, 1:04:40 left"]
    assert lines[-2:] == ["encoding: 9 %, 1:00:40 left", "joining"]
    assert len(lines) == 8


def test_a_terminal_gets_a_bar_no_faster_than_an_eye_can_follow() -> None:
    stream, now = Terminal(), [0.0]
    printer = PhasePrinter(stream, clock=lambda: now[0])
    for done in range(0, 101, 25):
        printer.tell("hashing", done, 100)
        now[0] += 0.06
    printer.tell("joining", 0, 0)
    printer.end()
    shown = stream.getvalue().replace("\r\x1b[K", "|").split("|")[1:]
    bars = [format_phase("hashing", done, 100) for done in (0, 50, 100)]
    assert shown == [*bars, "hashing\n", "joining", "joining\n"]


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0, 0, "x"),
        (0, 8, "x [                        ] 0 %"),
        (4, 8, "x [############            ] 50 %"),
        (8, 8, "x [########################] 100 %"),
    ],
)
def test_a_bar_is_as_full_as_the_work_is_done(done: int, total: int, text: str) -> None:
    assert format_phase("x", done, total) == text


def test_a_phase_that_fails_leaves_its_line() -> None:
    stream = Terminal()
    with pytest.raises(RuntimeError), phases(stream):
        tell("hashing", 1, 2)
        raise RuntimeError
    assert stream.getvalue().endswith("hashing\n")


def test_a_full_disk_costs_lines_alone() -> None:
    with phases(FullDisk()):
        tell("hashing")
