from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from health.heartbeat import BEAT_INTERVAL_S, NO_STEP, Heartbeat, HeartbeatReader, parse_record
from health.pace import pace_of
from health.process import parse_state, read_state
from tests.support import ROOT
from tests.support.watching import wait_until

DEADLINE_S = 30.0
WORKER = """
import sys, time
from health.heartbeat import Heartbeat
heartbeat = Heartbeat()
heartbeat.mark(7, 3)
print(heartbeat.fd, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker() -> Iterator[tuple[int, int]]:
    """A process that beats: its id, and the number of its heartbeat's descriptor."""
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


def test_another_process_reads_what_was_marked_and_sees_it_beat(worker: tuple[int, int]) -> None:
    reader = HeartbeatReader(*worker)
    first = reader.read()
    assert (first.serial, first.step, first.phase) == (1, 7, 3)
    assert 0 <= time.monotonic() - first.phase_s < DEADLINE_S
    wait_until(lambda: reader.read().beat_s >= first.beat_s + 2 * BEAT_INTERVAL_S, DEADLINE_S)
    assert reader.read().phase_s == first.phase_s
    reader.close()


def test_a_stopped_process_does_not_beat_until_it_goes_on(worker: tuple[int, int]) -> None:
    pid, _ = worker
    reader = HeartbeatReader(*worker)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: read_state(pid) == "T", DEADLINE_S)
    stopped = reader.read()
    mine, before = Heartbeat(), time.monotonic()
    own = HeartbeatReader(os.getpid(), mine.fd)
    wait_until(lambda: own.read().beat_s > before + 3 * BEAT_INTERVAL_S, DEADLINE_S)
    assert reader.read() == stopped
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: reader.read().beat_s > stopped.beat_s, DEADLINE_S)
    reader.close()
    own.close()


def test_the_record_of_a_dead_process_can_still_be_read_and_leaves_no_file(
    worker: tuple[int, int],
) -> None:
    pid, fd = worker
    reader = HeartbeatReader(pid, fd)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: read_state(pid) == "Z", DEADLINE_S)
    assert (reader.read().step, reader.read().phase) == (7, 3)
    reader.close()
    with pytest.raises(OSError):
        HeartbeatReader(pid, fd)


def test_each_mark_has_a_serial_and_a_time() -> None:
    heartbeat = Heartbeat()
    reader = HeartbeatReader(os.getpid(), heartbeat.fd)
    assert reader.read().serial == 0
    heartbeat.mark(1, 2)
    first = reader.read()
    heartbeat.mark(2, 0)
    second = reader.read()
    assert (second.serial, second.step, second.phase) == (2, 2, 0)
    assert second.phase_s >= first.phase_s
    reader.close()


def test_it_shows_the_first_step_that_was_computed_since_the_run_went_back() -> None:
    heartbeat = Heartbeat(computing={0, 1})
    reader = HeartbeatReader(os.getpid(), heartbeat.fd)
    shown = []
    for step, phase in [(5, 3), (6, 1), (7, 0), (3, 3), (4, 0), (5, 1)]:
        heartbeat.mark(step, phase)
        shown.append(reader.read().first)
    reader.close()
    assert shown == [NO_STEP, 6, 6, 6, 4, 4]


def test_it_shows_whether_a_build_goes_on_beside_the_steps() -> None:
    heartbeat = Heartbeat()
    reader = HeartbeatReader(os.getpid(), heartbeat.fd)
    shown = [reader.read().builds_beside]
    for goes_on in (True, False):
        heartbeat.build_beside(goes_on)
        heartbeat.mark(7, 3)
        shown.append(reader.read().builds_beside)
    reader.close()
    assert shown == [False, True, False]


def test_a_pace_is_shown_whole_or_not_at_all() -> None:
    heartbeat = Heartbeat()
    reader = HeartbeatReader(os.getpid(), heartbeat.fd)
    assert reader.read().pace is None
    first = pace_of(1, [1.5, 4.0, 2048.0, 0.01, 0.02, 0.3, 0.1])
    heartbeat.show(first)
    heartbeat.mark(7, 3)
    heartbeat.leave()
    shown = reader.read()
    assert (shown.pace, shown.step, shown.left) == (first, 7, 1)
    data = os.pread(reader._file, 1000, 0)
    half = data[:80] + (2).to_bytes(8, sys.byteorder) + data[88:]  # the next one has begun
    assert parse_record(data).pace == first and parse_record(half).pace is None
    heartbeat.show(replace(first, number=2))
    assert reader.read().pace == replace(first, number=2)
    reader.close()


@pytest.mark.parametrize(
    ("stat", "state"),
    [
        ("12 (python) S 1 12 12 0 -1 4194304 1 0", "S"),
        ("12 (ray::W) T (x)) T 1 12 12 0 -1 4194304 1 0", "T"),
        ("12 () t 1", "t"),
    ],
)
def test_the_state_comes_after_the_last_bracket(stat: str, state: str) -> None:
    assert parse_state(stat) == state


def test_this_process_runs_and_a_reaped_one_has_no_state() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert read_state(os.getpid()) == "R"
    assert read_state(child.pid) is None
