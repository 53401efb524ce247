"""A cluster that starts with a run, where there is none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import ray

from elastic.ray_compat.cluster import connect
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
