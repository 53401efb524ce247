"""`ray job submit` of the quickstart against a cluster started with `ray start --head`."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._processes import free_port
from tests.support import ROOT

RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A token of its own, so that neither the user's cluster nor that of other tests is met."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {
        **inherited,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # The head would wait 30 s for its last workers when it is ended.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


@pytest.fixture
def head(environment: dict[str, str]) -> Iterator[str]:
    """A head node of its own. Yields the address of its dashboard."""
    ports = {
        name: str(free_port())
        for name in ("port", "dashboard-port", "dashboard-agent-listen-port", "metrics-export-port")
    }
    options = [part for name, port in ports.items() for part in (f"--{name}", port)]
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        process = subprocess.Popen(
            [
                RAY,
                "start",
                "--head",
                "--block",
                "--num-cpus",
                "4",
                "--temp-dir",
                directory,
                *options,
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "--block" in line:
                break
        assert process.poll() is None, "".join(seen)
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        try:
            yield f"http://127.0.0.1:{ports['dashboard-port']}"
        finally:
            process.terminate()
            process.wait(60)


def test_quickstart_as_a_ray_job(head: str, environment: dict[str, str], tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    command = [RAY, "job", "submit", "--address", head, "--working-dir", ".", "--"]
    command += [sys.executable, "examples/quickstart.py", "--steps", "6", "--seq-len", "32"]
    command += ["--storage", str(storage), "--spares", "0"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [part for part in done.stdout.splitlines() if part.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert (result["steps"], result["lost_steps"]) == (6, 0)
    assert result["final_loss"] < result["first_loss"]
    assert (storage / "quickstart" / "report.json").exists()
