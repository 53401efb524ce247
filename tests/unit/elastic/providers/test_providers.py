from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.providers.ec2_spot import METADATA_VARIABLE, SpotWatch, on_ec2
from elastic.providers.ray_drain import DrainWatch
from tests.support import ROOT
from tests.support.fakes.metadata import Metadata, serve_metadata
from tests.support.plugins import install_plugin

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


def test_a_draining_node_that_could_not_be_told_of_is_told_of_at_the_next_look() -> None:
    told: Told = queue.Queue()
    refusals = [ConnectionError("the coordinator is away")]

    def tell(*notice: Any) -> None:
        if refusals:
            raise refusals.pop()
        told.put(notice)

    watch = DrainWatch(lambda: {"a": 0}, tell, interval_s=0.001)
    assert told.get(timeout=WAIT_S)[0] == "a" and not refusals
    watch.close()
    assert told.empty()


SIGTERM_PROGRAM = """
import signal, sys, threading
from elastic.providers.sigterm import catch_sigterm, on_sigterm
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


FORK_PROGRAM = """
import os, threading
from elastic.providers.sigterm import catch_sigterm, on_sigterm
catch_sigterm()
told = threading.Event()
on_sigterm(told.set)
child = os.fork()
if child == 0:
    os.write(1, b"%d\\n" % os.getpid())
    told.wait(20)
    os._exit(9)
how = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(how, told.wait(0.5), flush=True)
assert told.wait(20)
"""


def test_sigterm_ends_a_forked_child_and_is_no_notice_to_its_parent() -> None:
    """As `multiprocessing.Pool` sends it to its workers at its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORK_PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGTERM)
    assert process.stdout.readline() == f"{-signal.SIGTERM} False\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0, "its own one still is"
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


def test_a_spot_notice_that_could_not_be_told_of_is_told_of_at_the_next_look(
    metadata: type[Metadata],
) -> None:
    """The coordinator knows of it by then, and Ray's head was away."""
    metadata.looks_before_notice = 0
    metadata.notice = b'{"action": "stop", "time": "2026-01-01T00:02:00Z"}'
    told: Told = queue.Queue()
    refusals = [ConnectionError("Ray is away")]

    def tell(*notice: Any) -> None:
        if refusals:
            raise refusals.pop()
        told.put(notice)

    watch = SpotWatch("n1", tell, interval_s=0.001)
    assert told.get(timeout=WAIT_S)[2] == "EC2 spot interruption: stop" and not refusals
    watch.close()
    assert told.empty()


def test_a_service_that_has_answered_is_asked_for_good(
    metadata: type[Metadata], caplog: pytest.LogCaptureFixture
) -> None:
    metadata.looks_before_notice, metadata.looks_throttled = 2, 30
    metadata.notice = b'{"action": "stop", "time": "2026-01-01T00:02:00Z"}'
    told: Told = queue.Queue()
    watch = SpotWatch("n1", lambda *notice: told.put(notice), interval_s=0.001)
    assert told.get(timeout=WAIT_S)[2] == "EC2 spot interruption: stop"
    watch.close()
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "not answered 10 times in a row (HTTP Error 503" in warning
    assert "HopLimit" not in warning, "the token has arrived"
    assert metadata.looks == 1 + 30 + 2


def test_a_service_whose_token_does_not_arrive_is_warned_of_once_and_asked_on(
    metadata: type[Metadata], caplog: pytest.LogCaptureFixture
) -> None:
    """As in pods, where the instance's hop limit is 1."""
    metadata.tokens_withheld = 30
    metadata.notice = b'{"action": "stop", "time": "2026-01-01T00:02:00Z"}'
    told: Told = queue.Queue()
    watch = SpotWatch("n1", lambda *notice: told.put(notice), interval_s=0.001)
    assert told.get(timeout=WAIT_S)[2] == "EC2 spot interruption: stop"
    watch.close()
    assert metadata.tokens_withheld == 0
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "not answered 10 times in a row" in warning
    assert warning.endswith("HttpPutResponseHopLimit to 2")


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


PLUGIN = """
import os, threading, time
from pathlib import Path


class FileWatch:
    def __init__(self, node, tell):
        self._over = threading.Event()
        threading.Thread(target=self._look, args=(node, tell), daemon=True).start()

    def _look(self, node, tell):
        while not self._over.wait(0.01):
            if Path(os.environ["NOTICE"]).exists():
                tell(node, 1_700_000_000.0, Path(os.environ["NOTICE"]).read_text())
                return

    def close(self):
        self._over.set()


def not_here(node, tell):
    return None


def broken(node, tell):
    raise OSError("no such service")
"""

PROGRAM = """
import queue
from elastic.providers.node_watches import start_watches

told = queue.SimpleQueue()
watches = start_watches("n1", lambda *notice: told.put(notice))
print([type(watch).__name__ for watch in watches], flush=True)
print(*told.get(timeout=20), flush=True)
for watch in watches:
    watch.close()
"""


def test_a_watch_of_a_plugin_is_started_on_a_node_and_a_broken_one_is_left_out(
    tmp_path: Path,
) -> None:
    names = {name: f"notices_in_files:{name}" for name in ("FileWatch", "broken", "not_here")}
    install_plugin(tmp_path, "notices_in_files", PLUGIN, {"elastictrainer.providers": names})
    notice = tmp_path / "notice"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "NOTICE": str(notice),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "['FileWatch']\n"
    notice.write_text("the rack is moved")
    out, err = process.communicate(timeout=WAIT_S)
    assert out == "n1 1700000000.0 the rack is moved\n"
    assert "'broken' for notices about node n1 does not start" in err
