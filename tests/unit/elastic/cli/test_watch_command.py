"""`elastic watch` on run directories that are written by hand, with a real web server to tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic.cli import watch
from elastic.cli.main import main
from elastic.cli.watch import WEBHOOK_VARIABLE
from elastic.protocol import events
from elastic.protocol.causes import USER_ERROR, Cause
from elastic.protocol.pulse import Pulse, read_pulse, write_pulse
from elastic.protocol.run_paths import RunPaths
from elastic.reporting import webhook
from elastic.reporting.alerts import Limits
from elastic.reporting.event_log import EventLog
from tests.support import ROOT
from tests.support.watching import wait_until

SECRET = "T0KEN"
PATIENCE_S = 60.0


class Directory:
    """A run's directory, as its coordinator writes it."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root=root)
        self.log = EventLog(self.paths.events)
        self.log.append(
            events.RunStarted(
                time=time.time() - 3, name="r", layout={}, steps=50, start_step=0, versions={}
            )
        )

    def beat(self, **changes: Any) -> Pulse:
        """Writes a pulse."""
        now = time.time()
        facts: dict[str, Any] = {
            "time": now,
            "steps": 12,
            "planned_steps": 50,
            "stepped": now,
            "step_s": 0.1,
            "replicas": 2,
            "min_replicas": 1,
            "spares": 1,
            "planned_spares": 1,
            "spareless_since": None,
            "spent": {"max_crashes": (0, 50)},
        }
        pulse = Pulse(**{**facts, **changes})
        write_pulse(self.paths.pulse, pulse)
        return pulse

    def end(self, outcome: events.RunOutcome, cause: Cause | None = None) -> None:
        error = "it broke" if outcome == "failed" else None
        self.log.append(
            events.RunEnded(time=time.time(), step=12, outcome=outcome, error=error, cause=cause)
        )

    def hang(self) -> None:
        """Whoever reads the pulse from now on hangs: here in a pipe that nobody writes to."""
        part = self.paths.root / "part"
        os.mkfifo(part)
        os.replace(part, self.paths.pulse)

    def answer(self) -> None:
        """Whoever hangs is let go, with nothing. Waits for the first of them."""
        os.close(os.open(self.paths.pulse, os.O_WRONLY))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "llama")
    yield directory
    directory.log.close()


def test_a_coordinator_whose_machine_is_replaced_is_not_dead(
    run: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray gives a machine that says nothing up after 65 s, and starts the next one then."""
    begun = events.RunStarted(
        time=time.time() - 500, name="r", layout={}, steps=50, start_step=0, versions={}
    )
    run.log.append(begun)
    command = ["watch", str(run.paths.root), "--once"]
    run.beat(time=time.time() - 90)
    assert main(command) == 0
    run.beat(time=time.time() - 130)
    assert main(command) == 1
    assert "dead: no pulse for 130 s" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def _no_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WEBHOOK_VARIABLE, raising=False)
    monkeypatch.setattr(webhook, "FIRST_PAUSE_S", 0.01)


class Listener:
    """A web server that takes news, after it has answered with `refusals`."""

    def __init__(self, refusals: list[int]) -> None:
        self.taken: list[dict[str, Any]] = []
        self.asked: list[str] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                listener.asked.append(self.path)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = refusals.pop(0) if refusals else 200
                if status == 200:
                    listener.taken.append(body)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    made: list[Listener] = []
    yield made
    for listener in made:
        listener.server.shutdown()
        listener.server.server_close()


def listener(listeners: list[Listener], *refusals: int) -> Listener:
    listeners.append(Listener(list(refusals)))
    return listeners[-1]


def test_a_run_that_is_well(run: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    pulse = run.beat()
    assert read_pulse(run.paths.pulse) == pulse
    assert main(["watch", str(run.paths.root), "--once"]) == 0
    assert "llama: 12 of 50 steps, 2 replicas, 1 of 1 spares" in capsys.readouterr().out


def test_one_look_as_json_tells_all_that_is_wrong(
    run: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    run.beat(spareless_since=time.time() - 500, spares=0, spent={"max_hangs": (9, 10)})
    assert main(["watch", str(run.paths.root), "--once", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [alert["kind"] for alert in told["alerts"]] == ["spares_exhausted", "budget_low"]
    assert (told["run"], told["outcome"], told["status"]) == ("llama", None, 1)
    assert told["pulse"]["spent"] == {"max_hangs": [9, 10]}


@pytest.mark.parametrize(
    ("outcome", "cause", "status"),
    [("finished", None, 0), ("failed", None, 1), ("failed", USER_ERROR, 93)],
)
def test_the_end_of_the_run_is_the_status(
    run: Directory, outcome: events.RunOutcome, cause: Cause | None, status: int
) -> None:
    run.beat()
    run.end(outcome, cause)
    assert main(["watch", str(run.paths.root)]) == status


def test_bad_input_ends_with_2(run: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run.paths.root.parent), "--once"]) == 2
    assert "no run's directory: it has no events.jsonl" in capsys.readouterr().err
    bad_host, bad_path = f"https://a..b/{SECRET}", f"https://host/{SECRET}/\u00e4"
    for url in ("file:///etc/passwd", f"https:/{SECRET}", f"http://[{SECRET}", bad_host, bad_path):
        assert main(["watch", str(run.paths.root), "--webhook", url]) == 2
        shown = capsys.readouterr().err
        assert "ELASTIC_WEBHOOK" in shown and SECRET not in shown


def test_the_webhook_hears_after_refusals(
    run: Directory,
    listeners: list[Listener],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hook = listener(listeners, 503, 429)
    monkeypatch.setenv(WEBHOOK_VARIABLE, hook.url)
    run.beat(spent={"max_hangs": (9, 10)})
    assert main(["watch", str(run.paths.root), "--once"]) == 1
    (told,) = hook.taken
    assert (told["run"], told["state"], told["kind"]) == ("llama", "firing", "budget_low")
    assert len(hook.asked) == 3
    shown = capsys.readouterr()
    assert shown.err == "" and SECRET not in shown.out


@pytest.mark.parametrize(
    ("refusals", "asked"),
    [([503] * 9, 3), ([404], 1), ([302], 1)],
    ids=["always", "unknown", "redirects"],
)
def test_a_webhook_that_refuses_ends_nothing_and_its_url_is_told_to_nobody(
    run: Directory,
    listeners: list[Listener],
    capsys: pytest.CaptureFixture[str],
    refusals: list[int],
    asked: int,
) -> None:
    hook = listener(listeners, *refusals)
    run.beat(spent={"max_hangs": (9, 10)})
    assert main(["watch", str(run.paths.root), "--once", "--webhook", hook.url]) == 1
    assert len(hook.asked) == asked and not hook.taken
    shown = capsys.readouterr().err
    assert f"the webhook at 127.0.0.1: HTTP status {refusals[0]}, in try {asked}" in shown
    assert SECRET not in shown


def test_the_last_word_is_not_said_again_to_who_will_never_take_it(
    run: Directory, listeners: list[Listener]
) -> None:
    """A webhook that was revoked would keep the exit status back for ten minutes."""
    hook = listener(listeners, *[410] * 9)
    run.end("failed", USER_ERROR)
    root = str(run.paths.root)
    assert main(["watch", root, "--interval", "0.01", "--webhook", hook.url]) == 93
    assert len(hook.asked) == 1


@pytest.mark.parametrize(("refused", "patience_s", "taken"), [(4, 60.0, 1), (99, 0.2, 0)])
def test_the_last_word_is_said_again_for_a_while(
    run: Directory,
    listeners: list[Listener],
    monkeypatch: pytest.MonkeyPatch,
    refused: int,
    patience_s: float,
    taken: int,
) -> None:
    monkeypatch.setattr(watch, "LAST_WORD_S", patience_s)
    hook = listener(listeners, *[503] * refused)
    run.end("failed", USER_ERROR)
    root = str(run.paths.root)
    assert main(["watch", root, "--interval", "0.01", "--webhook", hook.url]) == 93
    assert [told["kind"] for told in hook.taken] == ["failed"] * taken


def test_nobody_listens(run: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.server_close()
    url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
    run.beat(spent={"max_hangs": (9, 10)})
    assert main(["watch", str(run.paths.root), "--once", "--webhook", url]) == 1
    assert "ConnectionRefusedError, in try 3 of 3" in capsys.readouterr().err


def test_a_watch_follows_the_run_from_death_to_life_to_its_end(
    run: Directory, listeners: list[Listener]
) -> None:
    hook = listener(listeners, 404)  # the first word is lost
    run.beat(time=time.time() - 2)
    command = [sys.executable, "-m", "elastic.cli.main", "watch", str(run.paths.root)]
    process = subprocess.Popen(
        [*command, "--dead", "1.5", "--interval", "0.05"],
        cwd=ROOT,
        env={**os.environ, WEBHOOK_VARIABLE: hook.url},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(hook.taken) >= 1)
        assert (hook.taken[0]["state"], hook.taken[0]["kind"]) == ("firing", "dead")
        run.beat(time=time.time() + 1_000)  # it lives for as long as this test takes
        wait_until(lambda: len(hook.taken) >= 2)
        assert (hook.taken[1]["state"], hook.taken[1]["kind"]) == ("resolved", "dead")
        run.end("failed", USER_ERROR)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 93
    assert (hook.taken[2]["state"], hook.taken[2]["kind"]) == ("firing", "failed")
    assert "a retry is useless" in out and SECRET not in out
    assert len(hook.taken) == 3


def test_one_look_at_a_directory_that_hangs_says_so_and_ends(
    run: Directory, listeners: list[Listener]
) -> None:
    """A job of cron must not pile up."""
    hook = listener(listeners)
    run.hang()
    program = (
        "import sys; from elastic.cli import main, watch; watch.LEAST_BOUND_S = 0.01\n"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "watch", str(run.paths.root)]
    done = subprocess.run(
        [*command, "--once", "--interval", "0.6"],
        cwd=ROOT,
        env={**os.environ, WEBHOOK_VARIABLE: hook.url},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "llama: dead: its directory has not answered for " in done.stdout
    assert [told["kind"] for told in hook.taken] == ["dead"]


def test_where_the_directory_hangs_what_was_seen_grows_old_and_one_thread_waits(
    run: Directory,
) -> None:
    limits = Limits(stalled_s=600.0, dead_s=60.0, storm=5)
    view, late = watch._View(run.paths, limits, 60.0), watch._View(run.paths, limits, 60.0)

    def kinds(of: watch._View, after_s: float = 0.0) -> list[str]:
        return [alert.kind for alert in of.alerts(time.time() + after_s)]

    run.beat()
    view.look(PATIENCE_S)
    assert kinds(view) == []
    run.hang()
    for _ in range(3):
        view.look(0.01)
    assert [thread.name for thread in threading.enumerate()].count("look") == 1
    assert (kinds(view), kinds(view, after_s=61.0)) == ([], ["dead"])
    run.answer()
    view.look(PATIENCE_S)
    assert kinds(view, after_s=61.0) == ["dead"], "nothing was there"
    run.beat(time=time.time() + 61.0)
    view.look(PATIENCE_S)
    assert kinds(view, after_s=61.0) == []
    run.hang()
    late.look(0.01)
    assert kinds(late) == [], "it may yet answer"
    run.answer()


def test_a_run_that_is_begun_anew_is_seen_to_its_end(
    run: Directory,
) -> None:
    """By `resume="never"`, which sets the earlier one aside; its records are longer."""
    run.end("failed", USER_ERROR)
    view = watch._View(run.paths, Limits(stalled_s=600.0, dead_s=60.0, storm=5), 60.0)
    view.look(PATIENCE_S)
    assert [alert.kind for alert in view.alerts(time.time())] == ["failed"]
    run.log.close()
    run.paths.set_aside()
    run.log = Directory(run.paths.root).log
    view.look(PATIENCE_S)
    assert view.alerts(time.time()) == [] and view.watched.ended is None
    run.end("finished")
    view.look(PATIENCE_S)
    ended = view.watched.ended
    assert ended is not None and ended.outcome == "finished"


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": None},
        {"steps": "many"},
        {"stepped": True},
        {"spent": [1, 2]},
        {"spent": {"max_hangs": 3}},
        {"spent": {"max_hangs": [1, "10"]}},
    ],
)
def test_a_pulse_of_another_shape_is_none(run: Directory, wrong: dict[str, Any]) -> None:
    pulse = run.beat()
    told = json.loads(run.paths.pulse.read_text())
    run.paths.pulse.write_text(json.dumps(told | {"stepped": None, "of_later": 1}))
    assert read_pulse(run.paths.pulse) == replace(pulse, stepped=None)
    run.paths.pulse.write_text(json.dumps(told | wrong))
    assert read_pulse(run.paths.pulse) is None
