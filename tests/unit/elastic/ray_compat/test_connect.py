"""A cluster that starts with a run, where there is none."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import pytest
import ray
from ray._private import ray_logging, worker
from ray.train.v2._internal.execution.worker_group import RayTrainWorker

from elastic.ray_compat.cluster import connect, leave_out_workers
from health.oom_kills import RAY_MONITOR


@pytest.mark.parametrize(
    ("theirs", "there", "pod", "found"),
    [
        pytest.param(None, False, False, "0", id="one starts"),
        pytest.param("250", False, False, "250", id="and the user has said how"),
        pytest.param(None, True, False, None, id="one is there"),
        pytest.param(None, False, True, None, id="in a pod, all of which the kernel may end"),
    ],
)
def test_a_cluster_that_starts_here_has_no_memory_monitor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    theirs: str | None,
    there: bool,
    pod: bool,
    found: str | None,
) -> None:
    """It would end the coordinator first. That of another cluster is not for us to say."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    if not pod:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    monkeypatch.setenv(RAY_MONITOR, theirs or "")
    if theirs is None:
        monkeypatch.delenv(RAY_MONITOR)
    started: list[str | None] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda: started.append(os.environ.get(RAY_MONITOR)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        if there:
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        connect()
    assert started == [found]


def test_what_workers_write_is_left_out_and_all_else_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the parts of Ray that print it."""
    streams = ray_logging.WorkerStandardStreamDispatcher()
    show = functools.partial(worker.print_to_stdstream, ignore_prefix=False)
    streams.add_handler("ray_print_logs", show)
    leave_out_workers(streams)
    said = {"ip": "10.0.0.1", "job": "1", "is_err": True, "localhost": "10.0.0.1", "task_name": ""}
    for name, pid in ((RayTrainWorker.__name__, 3), ("Supervisor", 4), (None, "raylet")):
        streams.emit({**said, "actor_name": name, "pid": pid, "lines": [f"by {name}"]})
    told = capsys.readouterr().err
    assert "by Supervisor" in told and "by None" in told and "by RayTrainWorker" not in told
    streams.remove_handler("ray_print_logs")
    assert streams.handlers == [], "as where Ray is left"
