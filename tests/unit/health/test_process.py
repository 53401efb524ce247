from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from health.process import parse_born_ticks, parse_ending, parse_state, read_born_ticks, read_state

STAT = "42 (a (b) c) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 8192 1 184467"


def test_a_name_with_brackets_and_blanks_hides_nothing() -> None:
    assert parse_state(STAT) == "S"
    assert parse_born_ticks(STAT) == 123456


@pytest.mark.parametrize(
    ("state", "flags", "ending"),
    [("S", 4194560, False), ("Z", 4194560, True), ("R", 4194560 | 4, True), ("D", 4228108, True)],
)
def test_who_gives_its_memory_back_is_about_to_end(state: str, flags: int, ending: bool) -> None:
    """The last is of a process of 2 GB, a moment after its SIGKILL."""
    stat = STAT.replace(" S ", f" {state} ").replace(" 4194560 ", f" {flags} ")
    assert parse_ending(stat) is ending


def test_a_later_process_was_started_later() -> None:
    ticks_s = os.sysconf("SC_CLK_TCK")
    now = float(Path("/proc/uptime").read_text().split()[0]) * ticks_s
    with subprocess.Popen(["sleep", "1000"]) as process:
        born = read_born_ticks(process.pid)
        mine = read_born_ticks(os.getpid())
        process.kill()
    assert born is not None and mine is not None
    assert mine < now - 1 < born < now + 10 * ticks_s


def test_of_a_process_that_is_gone_there_is_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert (read_state(process.pid), read_born_ticks(process.pid)) == (None, None)
