from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.providers.notices import METADATA_VARIABLE, DrainWatch, SpotWatch, on_ec2
from tests.support import ROOT
from tests.support.fakes.metadata import Metadata, serve_metadata

Told = queue.Queue[tuple[str, float | None, str]]
WAIT_S = 20.0


def test_each_draining_node_is_told_of_once_with_its_deadline() -> None:
    looks: list[dict[str, int] | Exception] = [
        {},
        {"a": 1_700_000_000_500},
        ConnectionError("Ray is away"),
        {"a": 1_700_000_000_500, "b": 0},
    ]
    answers, seen_all = iter(looks), threading.Event()
    told: Told = queue.Queue()

    def look() -> dict[str, int]:
        answer = next(answers, None)
        if answer is None:
            seen_all.set()
            return {"a": 1_700_000_000_500, "b": 0}
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = DrainWatch(look, lambda *notice: told.put(notice), interval_s=0.001)
    assert seen_all.wait(WAIT_S)
    watch.close()
    notices = [told.get_nowait() for _ in range(told.qsize())]
    reason = "Ray drains the node"
    assert notices == [("a", 1_700_000_000.5, reason), ("b", None, reason)]


SIGTERM_PROGRAM = """
import signal, sys, threading
from elastic.providers.notices import catch_sigterm, on_sigterm
catch_sigterm()
if sys.argv[1] == "early":
    signal.raise_signal(signal.SIGTERM)
told = threading.Event()
on_sigterm(told.set)
print("ready", flush=True)
assert told.wait(20)
print("told", flush=True)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_sigterm_calls_back_and_the_process_goes_on(when: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SIGTERM_PROGRAM, when],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    if when == "late":
        process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "told\n"
    assert process.wait(WAIT_S) == 0
    process.stdout.close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Metadata]]:
    with serve_metadata() as (url, handler):
        monkeypatch.setenv(METADATA_VARIABLE, url)
        yield handler


def test_a_spot_notice_is_told_of_once(metadata: type[Metadata]) -> None:
    metadata.looks_before_notice = 3
    metadata.notice = b'{"action": "terminate", "time": "2026-01-01T00:02:00Z"}'
    told: Told = queue.Queue()
    watch = SpotWatch("n1", lambda *notice: told.put(notice), interval_s=0.001)
    # 2026-01-01T00:02:00Z by `date -d 2026-01-01T00:02:00Z +%s`
    expected = ("n1", 1_767_225_720.0, "EC2 spot interruption: terminate")
    assert told.get(timeout=WAIT_S) == expected
    watch.close()
    assert told.empty() and metadata.tokens == 2 and metadata.looks_before_notice == -1


def test_a_watch_without_a_service_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METADATA_VARIABLE, "http://127.0.0.1:9")
    told: Told = queue.Queue()
    watch = SpotWatch("n1", lambda *notice: told.put(notice), interval_s=0.001)
    watch._thread.join(WAIT_S)
    assert not watch._thread.is_alive() and told.empty()


def test_ec2_is_recognised_by_its_firmware(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(METADATA_VARIABLE, raising=False)
    vendor = tmp_path / "sys_vendor"
    assert not on_ec2((str(vendor),))
    vendor.write_text("QEMU\n")
    assert not on_ec2((str(vendor),))
    vendor.write_text("Amazon EC2\n")
    assert on_ec2((str(vendor),))
    monkeypatch.setenv(METADATA_VARIABLE, "http://127.0.0.1:9")
    assert on_ec2(())
