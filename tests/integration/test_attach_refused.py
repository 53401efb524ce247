"""What a command about a run says where the cluster, or the run's directory, refuses it: one line,
and status 2. 1 would say that the run has failed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import ray

from elastic.cli import logs
from elastic.cli.main import main
from elastic.protocol.events import RunEnded, WorkerJoined
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.cluster import end_actors, start_actor
from elastic.reporting.event_log import EventLog
from elastic.reporting.outputs import keep_files
from health.process import output_folders
from tests.support import ROOT
from tests.support.run_end import Broken

NOBODY = "10.0.0.1"
"""No address that Ray knows the form of."""


@pytest.mark.parametrize("address", [NOBODY, "http://127.0.0.1:8265"])
def test_an_address_that_is_none(address: str, tmp_path: Path) -> None:
    """In a process that has joined no cluster, of a run that may be on one."""
    with EventLog(RunPaths(root=tmp_path).events) as log:
        log.append(WorkerJoined(time=1, worker="w0", node="n", pid=1, born_ticks=1))
    command = [sys.executable, "-m", "elastic.cli.main", "stop", str(tmp_path)]
    done = subprocess.run(
        [*command, "--address", address], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"elastic: --address = '{address}': it cannot be joined: ")
    assert said.endswith("Use HOST:PORT of its head, here or as RAY_ADDRESS, and its versions.")


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (False, "which has no events.jsonl. Name a run's directory."),
        (True, "it finished after 7 steps. Look at "),
    ],
)
@pytest.mark.parametrize("command", ["attach", "stop"])
def test_without_a_cluster_a_run_that_cannot_be_on_one_is_told_as_such(
    command: str, ended: bool, why: str, tmp_path: Path
) -> None:
    """No address would find it."""
    if ended:
        with EventLog(RunPaths(root=tmp_path).events) as log:
            log.append(RunEnded(time=1, step=7, outcome="finished", error=None))
    arguments = [command, str(tmp_path), "--address", NOBODY]
    done = subprocess.run(
        [sys.executable, "-m", "elastic.cli.main", *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"elastic: RUN = '{tmp_path}': no run is going on in {tmp_path}")
    assert why in said


def test_a_call_that_fails(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(root=tmp_path / "run")
    start_actor(Broken, max_concurrency=10, name=paths.key)(None)
    address = ray.get_runtime_context().gcs_address
    assert main(["stop", str(paths.root), "--address", address]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("elastic: ") and "its disk is full" in said
    end_actors(paths.key)


def test_a_node_without_the_package_and_two_that_are_gone(
    cluster: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `ray job submit --working-dir`: what the command calls there cannot be imported."""
    (tmp_path / "only_here.py").write_text("def read(*told): return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logs, "read_files", importlib.import_module("only_here").read)
    node = ray.get_runtime_context().get_node_id()
    log = "/tmp/ray/session_x/logs/worker-0a-ffffffff-12.err"
    with EventLog(tmp_path / "events.jsonl") as records:
        for at, worker in ((node, "w0"), (node, "w1"), ("f" * 56, "w2"), ("e" * 56, "w3")):
            joined = WorkerJoined(time=1.0, worker=worker, node=at, pid=1, born_ticks=1, logs=[log])
            records.append(joined)
    keep_files(RunPaths(root=tmp_path).output_of("e" * 56), {log: "its\nlast words\n"})
    address = ray.get_runtime_context().gcs_address
    assert main(["logs", str(tmp_path), "--faults", "--address", address]) == 1
    why = "ModuleNotFoundError: No module named 'only_here'"
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"elastic: node {node[:6]}: {why}, and nothing of it is kept",
        "elastic: node ffffff: it is gone, and nothing of it is kept",
        "elastic: node eeeeee: it is gone, and this is what was kept before",
    ]
    assert said.out == ""
    assert main(["logs", str(tmp_path), "--address", address]) == 1
    assert capsys.readouterr().out == "spare w3 | its\nspare w3 | last words\n"


def test_output_is_shown_before_the_rest_is_fetched(cluster: None, tmp_path: Path) -> None:
    """Of thousands of workers it takes minutes. The second one's file is a pipe: who reads it waits
    for a writer."""
    (folder,) = ray.get(ray.remote(output_folders).remote())
    files = [Path(folder, f"worker-{uuid.uuid4().hex}-01000000-1.err") for _ in range(2)]
    files[0].write_text("one\nCUDA out of memory\n")
    os.mkfifo(files[1])
    node = ray.get_runtime_context().get_node_id()
    with EventLog(tmp_path / "events.jsonl") as records:
        for n, file in enumerate(files):
            records.append(
                WorkerJoined(
                    time=1.0, worker=f"w{n}", node=node, pid=1, born_ticks=1, logs=[str(file)]
                )
            )
    command = [sys.executable, "-m", "elastic.cli.main", "logs", str(tmp_path), "--faults"]
    command += ["--kib", str(64 << 10), "--address", ray.get_runtime_context().gcs_address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "spare w0 | CUDA out of memory\n"
        files[1].open("w").close()
        assert asking.stdout.read() == ""
    assert asking.returncode == 0
    for file in files:
        file.unlink()


@pytest.mark.parametrize(
    ("nodes", "named", "status"), [("e", [], 0), ("e", [NOBODY], 1), ("ef", [], 1), ("f", [], 2)]
)
def test_without_a_cluster_the_output_that_is_kept_is_shown(
    nodes: str, named: list[str], status: int, tmp_path: Path
) -> None:
    """In a process that can join none, as when the run's cluster is long gone. Who names one is to
    notice that it was not asked."""
    log = "/tmp/ray/session_x/logs/worker-0a-ffffffff-12.err"
    with EventLog(tmp_path / "events.jsonl") as records:
        for at in nodes:
            records.append(
                WorkerJoined(
                    time=1.0, worker=f"w-{at}", node=at * 56, pid=1, born_ticks=1, logs=[log]
                )
            )
    keep_files(RunPaths(root=tmp_path).output_of("e" * 56), {log: "its\nlast words\n"})
    command = [sys.executable, "-m", "elastic.cli.main", "logs", str(tmp_path)]
    command += [part for address in named for part in ("--address", address)]
    elsewhere = {**os.environ, "RAY_ADDRESS": NOBODY}
    done = subprocess.run(command, cwd=ROOT, env=elsewhere, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert done.stdout == ("" if status == 2 else "spare w-e | its\nspare w-e | last words\n")
    said = [line for line in done.stderr.splitlines() if line.startswith("elastic: ")]
    if status == 2:
        (refused,) = said
        assert refused.startswith(f"elastic: RAY_ADDRESS = {NOBODY!r}: it cannot be joined: ")
        return
    why, *of_nodes = said
    assert why.startswith("elastic: no node can be asked: it cannot be joined: ")
    kept = "elastic: node eeeeee: it was not asked, and this is what was kept before"
    missing = "elastic: node ffffff: it was not asked, and nothing of it is kept"
    assert of_nodes == [kept, missing][: len(nodes)]


def test_records_that_are_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They are passed over, and told of."""
    (tmp_path / "events.jsonl").write_text("no record\n")
    assert main(["logs", str(tmp_path)]) == 2
    assert "no worker of the run" in capsys.readouterr().err
    assert "events.jsonl:1: not JSON" in caplog.text
